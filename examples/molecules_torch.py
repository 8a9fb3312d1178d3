"""Molecules in micro-batches of graphs: energies, a mean over graphs, and forces, a mean over atoms (second order).

    python examples/molecules_torch.py

An interatomic potential is trained on energies and on forces, which are its gradient, so the loss is differentiated
twice. As in MACE, the loss of energies is a mean over graphs, and that of forces a mean over atoms. Molecules have
different numbers of atoms: a loop that averages micro-batches gives the atoms of small molecules more weight, and no
weight of a micro-batch is right for both terms. `totals=` counts the graphs and the atoms of the window first.

The graphs of a micro-batch are joined as in PyTorch Geometric, in the names of `Batch.to_dict()`: `batch` has the graph
of each atom, `ptr` the first atom of each graph, and `edge_index` pairs of atoms. Such a batch cannot be cut along an
axis: the micro-batches are those of the loader, and `stream` takes them as they are.
"""

import torch
from by_hand import apart, gradient_by_hand
from torch import nn

import funcga
import torch_backend

SPECIES, CUTOFF, FORCE_WEIGHT = 3, 3.0, 10.0


def distances(graphs, pos):
    """Of each edge."""
    to, of = graphs["edge_index"]
    return (pos[to] - pos[of]).norm(dim=1)


def per_graph(graphs, of_atoms):
    """The sum over the atoms of each graph."""
    return of_atoms.new_zeros(len(graphs["ptr"]) - 1).index_add(0, graphs["batch"], of_atoms)


class SchNet(nn.Module):
    """Atoms get messages from their neighbors, weighted by functions of the distance."""

    def __init__(self, width=32, radial=12):
        super().__init__()
        mlp = lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, width), nn.Softplus(), nn.Linear(width, outputs))
        self.embed, self.energy = nn.Embedding(SPECIES, width), mlp(width, 1)
        self.filter, self.update = mlp(radial, width), mlp(width, width)
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, radial))

    def forward(self, graphs, pos):
        """The energy of each graph."""
        (to, of), r = graphs["edge_index"], distances(graphs, pos)
        weights = self.filter((-10 * (r[:, None] - self.centers) ** 2).exp()) * (CUTOFF - r)[:, None] ** 2
        h = self.embed(graphs["z"])
        for _ in range(2):
            h = h + self.update(torch.zeros_like(h).index_add(0, to, weights * h[of]))
        return per_graph(graphs, self.energy(h)[:, 0])


def energy_and_forces(energy_fn, graphs, **how):
    """Of shapes [graphs] and [atoms, 3]."""
    pos = graphs["pos"].detach().requires_grad_()
    energy = energy_fn(graphs, pos)
    (slope,) = torch.autograd.grad(energy.sum(), pos, **how)
    return energy, -slope


def squares(model, graphs):
    """The squared errors of all energies, per atom as in MACE, and of the forces on all atoms."""
    energy, forces = energy_and_forces(model, graphs, create_graph=True)
    return ((energy - graphs["energy"]) / graphs["ptr"].diff()).square(), (forces - graphs["forces"]).square().mean(1)


def count(graphs):
    """What the two terms divide by."""
    return {"graphs": len(graphs["ptr"]) - 1, "atoms": len(graphs["z"])}


def part(model, graphs, *, totals):
    """The part of these graphs in the loss of the whole batch."""
    of_graphs, of_atoms = squares(model, graphs)
    return of_graphs.sum() / totals["graphs"] + FORCE_WEIGHT * of_atoms.sum() / totals["atoms"]


def of_batch(model, graphs):
    """The same, as it is written for a whole batch."""
    of_graphs, of_atoms = squares(model, graphs)
    return of_graphs.mean() + FORCE_WEIGHT * of_atoms.mean()


def morse(graphs, pos):
    """The energies that are to be learned."""
    (to, of), z = graphs["edge_index"], graphs["z"]
    pairs = (2 + z[to] + z[of]) / 8 * ((1 - (1.2 - distances(graphs, pos)).exp()).square() - 1)
    return per_graph(graphs, torch.zeros_like(pos[:, 0]).index_add(0, to, pairs))


def joined(molecules):
    """Molecules as a collate function joins them, with their energies and forces."""
    species, positions = zip(*molecules, strict=True)
    ptr = torch.tensor([0, *[len(z) for z in species]]).cumsum(0)  # where the atoms of each graph begin
    batch = torch.arange(len(species)).repeat_interleave(ptr.diff())
    graphs = {"z": torch.cat(species), "pos": torch.cat(positions), "batch": batch, "ptr": ptr}
    near = (torch.cdist(graphs["pos"], graphs["pos"]) < CUTOFF) & (batch[:, None] == batch)
    graphs["edge_index"] = near.fill_diagonal_(False).nonzero().T
    energy, forces = energy_and_forces(morse, graphs)
    return {**graphs, "energy": energy.detach(), "forces": forces}


def molecule(atoms):
    """(species, positions), with the atoms near the corners of a grid."""
    corners = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[torch.randperm(27)[:atoms]]
    return torch.randint(SPECIES, (atoms,)), 1.3 * corners + 0.1 * torch.randn(atoms, 3)


def main(epochs=10):
    """One window against the whole batch, and some training."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = SchNet()
    # From a single atom, which has no edge, to 17 atoms; four molecules in a micro-batch, two in the last one.
    molecules = [molecule(1 + index // 2) for index in range(34)]
    loader = [joined(molecules[start : start + 4]) for start in range(0, 34, 4)]

    step = funcga.stream(torch_backend.module_value_and_grad(model, part), fold=funcga.sum(), totals=count)
    whole = gradient_by_hand(model, of_batch, [(joined(molecules),)])
    _, grads = step(loader)
    print(f"energies and forces, {len(loader)} micro-batches of graphs: off by {apart(grads, whole):.0e}")
    usual = gradient_by_hand(model, of_batch, [(graphs,) for graphs in loader])
    print(f"    the usual loop, (loss / n).backward(): {apart(usual, whole):.0%}")

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        for window in funcga.windows(loader, 3):
            loss, grads = step(window)
            torch_backend.assign_grads(model, grads)
            optimizer.step()
        if epoch in (0, epochs - 1):
            print(f"epoch {epoch + 1:2}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
