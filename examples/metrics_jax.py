"""Loss, accuracy, counts and the predictions for all rows beside the gradients, each with a fold of its own.

    python examples/metrics_jax.py

What is counted is added up and divided once, by what was counted, what has a row for each example is put together in
the order of the batch, and the loss, a mean over rows, counts by its rows. By hand one averages the micro-batches'
means, which is another number when the last micro-batch is shorter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcga

ROWS, CLASSES = 19, 4
random = np.random.default_rng(0)
rows, weights = random.normal(size=(ROWS, 3)), random.normal(size=(3, CLASSES))
x, params = jnp.asarray(rows), jnp.asarray(weights)
labels = jnp.asarray(np.where(np.arange(ROWS) % 4, (rows @ weights).argmax(1), 0))  # most of them are found


def loss_and_metrics(params, x, labels):
    """The mean loss of a micro-batch; its logits, and how many of its rows are right, of how many."""
    logits = x @ params
    right = (logits.argmax(1) == labels).sum()
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, {"logits": logits, "accuracy": jnp.stack([right, len(x)])}


metrics = {"logits": funcga.concat(), "accuracy": funcga.ratio()}
gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)
step = funcga.accumulate(gradient, microbatch_size=8, fold=((funcga.mean(), metrics), funcga.mean()))


def main():
    """Nineteen rows, eight at a time, and at once."""
    (loss, found), grads = step(params, x, labels)
    (whole, expected), full = jax.jit(gradient)(params, x, labels)
    funcga.compare((loss, found["logits"], grads), (whole, expected["logits"], full)).assert_close()
    right, rows = expected["accuracy"]
    print(f"loss {loss:.4f}, accuracy {found['accuracy']:.4f} = {right}/{rows}, logits {found['logits'].shape}")


if __name__ == "__main__":
    main()
