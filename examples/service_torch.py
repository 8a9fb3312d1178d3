"""A fine-tuning service: clients call forward_backward and optim_step as they like, each for an adapter of its own.

    python examples/service_torch.py

The adapters lie in one tensor each, along a leading axis, and so do the sums and the counts of tokens that wait for
their steps. Requests of several clients are computed together. Some fail, and leave nothing behind, as the state is a
value that is replaced when all is done; the service is stopped in mid-window, and goes on from its file. In the end
every adapter is the one of a client who trains alone, with torch.optim.AdamW on whole batches.
"""

import io
import random

import torch
from torch.nn.functional import cross_entropy, embedding

import funcga
import torch_backend

CLIENTS, VOCABULARY, WIDTH, RANK, LENGTH = ("ann", "bob", "cat"), 17, 32, 4, 6
accumulator = funcga.Accumulator(funcga.sum())


def frozen():
    """The base model, which is the same for all: (embedding, head)."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return draw(VOCABULARY, WIDTH), draw(WIDTH, VOCABULARY) / WIDTH**0.5


TABLE, HEAD = frozen()


def losses(adapter, tokens, labels):
    """The loss of each row, summed over its tokens, with an adapter for all rows or one for each."""
    hidden = embedding(tokens, TABLE)
    logits = hidden @ HEAD + hidden @ adapter["down"] @ adapter["up"]
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)


def loss_fn(adapters, which, tokens, labels):
    """The loss of rows of several adapters, and the sums for each of them."""
    of_rows = losses({name: value[which] for name, value in adapters.items()}, tokens, labels)
    of_adapters = lambda rows: rows.new_zeros(len(CLIENTS)).index_add(0, which, rows)
    return of_rows.sum(), {"loss": of_adapters(of_rows.detach()), "tokens": of_adapters((labels != -100).sum(1))}


step = funcga.accumulate(funcga.value_and_grad(loss_fn, has_aux=True), microbatch_size=4, fold=funcga.sum())


def adamw(lr):
    """A transform for any of the optimizer's states: the rate comes with the call."""
    return torch_backend.from_optimizer(torch.optim.AdamW, lr=lr)


def start(adapters):
    """The state of a service that has done nothing."""
    alone = [{name: value[index] for name, value in adapters.items()} for index in range(len(CLIENTS))]
    window = accumulator.init({"grads": adapters, "tokens": torch.zeros(len(CLIENTS), dtype=torch.int64)})
    return {"adapters": adapters, "window": window, "optimizers": [adamw(0.0).init(each) for each in alone]}


def forward_backward(state, requests):
    """The state with the gradients of all requests, (client, tokens, labels)."""
    which = torch.cat([torch.full((len(tokens),), CLIENTS.index(client)) for client, tokens, _ in requests])
    tokens, labels = (torch.cat(parts) for parts in list(zip(*requests, strict=True))[1:])
    (_, sums), grads = step(state["adapters"], which, tokens, labels)
    return {**state, "window": accumulator.update(state["window"], {"grads": grads, "tokens": sums["tokens"]})}


def optim_step(state, client, lr):
    """The state after a step of one adapter, whose window is empty then; the others go on."""
    index = CLIENTS.index(client)
    sums, optimizers = accumulator.finalize(state["window"]), [*state["optimizers"]]
    params = {name: value[index] for name, value in state["adapters"].items()}
    grads = {name: value[index] / sums["tokens"][index] for name, value in sums["grads"].items()}
    params, optimizers[index] = funcga.transforms.apply(adamw(lr), grads, optimizers[index], params)
    where = torch.tensor([index])
    adapters = {name: value.index_copy(0, where, params[name][None]) for name, value in state["adapters"].items()}
    empty, held = lambda leaf: leaf.index_fill(0, where, 0), state["window"].accumulated
    emptied = {"grads": {name: empty(leaf) for name, leaf in held["grads"].items()}, "tokens": empty(held["tokens"])}
    return {"adapters": adapters, "window": state["window"]._replace(accumulated=emptied), "optimizers": optimizers}


def served(state, requests):
    """The state after a batch of requests, and those that failed: if one of them does, each is computed by itself."""
    try:
        return forward_backward(state, requests), []
    except IndexError:
        failed = []
        for request in requests:
            try:
                state = forward_backward(state, [request])
            except IndexError:
                failed.append(request)
        return state, failed


def saved_and_loaded(state):
    """The state through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def request(client, rows):
    """The task of a client is a multiple of each token; rows have different lengths."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    labels = tokens * (CLIENTS.index(client) + 2) % VOCABULARY
    lengths = torch.randint(1, LENGTH + 1, (rows, 1))
    return client, tokens, labels.masked_fill(torch.arange(LENGTH) >= lengths, -100)


def alone(adapter, calls):
    """The adapter of a client who trains alone: each step is one backward pass over all rows since the last."""
    adapter = {name: value.clone().requires_grad_() for name, value in adapter.items()}
    optimizer = torch.optim.AdamW(adapter.values())
    for window, lr in calls:
        tokens, labels = (torch.cat(parts) for parts in zip(*window, strict=True))
        loss = losses(adapter, tokens, labels).sum() / (labels != -100).sum()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return adapter, loss.item()


def main():
    """Serves 60 batches of requests."""
    torch.manual_seed(0)
    random.seed(0)
    down = torch.randn(len(CLIENTS), WIDTH, RANK, dtype=torch.float64) / WIDTH**0.5
    adapters = {"down": down, "up": torch.zeros(len(CLIENTS), RANK, VOCABULARY, dtype=torch.float64)}
    state, calls, waiting = start(adapters), {client: [] for client in CLIENTS}, {client: [] for client in CLIENTS}
    count_failed = 0
    for batch in range(60):
        requests = [request(random.choice(CLIENTS), random.randint(1, 9)) for _ in range(random.randint(1, 4))]
        if batch % 20 == 10:
            requests[0][1][-1, -1] = VOCABULARY  # a token that does not exist
        state, failed = served(state, requests)
        count_failed += len(failed)
        for each in requests:
            if not any(each is one for one in failed):
                waiting[each[0]].append(each[1:])
        client, lr = random.choice(CLIENTS), random.choice((0.03, 0.1))
        if waiting[client]:
            state = optim_step(state, client, lr)
            calls[client].append((waiting[client], lr))
            waiting[client] = []
        if batch == 30:
            state = saved_and_loaded(state)
            print(f"saved and loaded, while {', '.join(filter(waiting.get, CLIENTS))} wait for a step")
    print(f"{count_failed} requests failed")
    for index, client in enumerate(CLIENTS):
        expected, loss = alone({name: value[index] for name, value in adapters.items()}, calls[client])
        apart = max((state["adapters"][name][index] - value).abs().max().item() for name, value in expected.items())
        counts = f"{sum(len(window) for window, _ in calls[client])} requests, {len(calls[client])} steps"
        print(f"{client}: {counts}, loss {loss:.2f}; as alone, to 1e-12: {apart < 1e-12}")


if __name__ == "__main__":
    main()
