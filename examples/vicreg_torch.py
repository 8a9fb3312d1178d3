"""VICReg and Barlow Twins in micro-batches, exactly: both need means and second moments of the whole batch alone.

    python examples/vicreg_torch.py

Both losses take statistics over the rows of a batch: variances, covariances, and correlations. Those of a micro-batch
are others, so a loop that averages the losses of its micro-batches minimises another loss. But the statistics of the
batch are functions of its means and second moments, which are means over its micro-batches. `funcga.coupled` folds
these, computes the loss of what they come to, and pulls its gradient back through each micro-batch. That takes memory
for one micro-batch and a few matrices of D x D features, for any number of rows.

Both losses are the same for features that are shifted by a constant. Where these are far from 0, compared with their
spread, subtract one in `embed`: of large second moments the difference would lose its digits.

Sources: Bardes, Ponce and LeCun (2022), "VICReg"; Zbontar, Jing, Misra, LeCun and Deny (2021), "Barlow Twins".
"""

import torch
from by_hand import apart
from torch.nn.functional import relu

import funcga


def embed(params, x):
    """The features of each row."""
    return torch.tanh(x @ params["w"]) @ params["v"]


def summary_fn(params, x, y):
    """Of two views of some rows: means and second moments of their features a and b, and how many rows there are."""
    a, b = embed(params, x), embed(params, y)
    rows = len(a)
    moments = {"a": a.mean(0), "b": b.mean(0), "aa": a.T @ a / rows, "bb": b.T @ b / rows, "ab": a.T @ b / rows}
    return {"moments": moments, "rows": torch.tensor(rows)}


# A mean is weighted by rows, so micro-batches may be of any size.
FOLD = {"moments": funcga.mean(), "rows": funcga.sum()}


def vicreg(params, s):
    """25 * invariance + 25 * variance + covariance, of the summary of the whole batch."""
    m, rows = s["moments"], s["rows"]
    invariance = (m["aa"] + m["bb"] - 2 * m["ab"]).diagonal().mean()
    variance, covariance = 0.0, 0.0
    for view in ("a", "b"):
        of_rows = (m[view + view] - torch.outer(m[view], m[view])) * rows / (rows - 1)
        variances = of_rows.diagonal()
        variance = variance + relu(1 - (variances + 1e-4).sqrt()).mean() / 2
        covariance = covariance + (of_rows.square().sum() - variances.square().sum()) / len(variances)
    return 25 * invariance + 25 * variance + covariance


def barlow_twins(params, s):
    """How far the correlations of the two views are from the identity, of the summary of the whole batch."""
    m = s["moments"]
    deviation = lambda view: (m[view + view].diagonal() - m[view].square()).sqrt()
    correlations = (m["ab"] - torch.outer(m["a"], m["b"])) / torch.outer(deviation("a"), deviation("b"))
    on_diagonal = correlations.diagonal()
    return (on_diagonal - 1).square().sum() + 0.005 * (correlations.square().sum() - on_diagonal.square().sum())


def vicreg_of_rows(params, x, y):
    """The same, as it is written for a whole batch."""
    a, b = embed(params, x), embed(params, y)
    variance = sum(relu(1 - (features.var(0) + 1e-4).sqrt()).mean() / 2 for features in (a, b))
    covariances = [torch.cov(features.T) for features in (a, b)]
    covariance = sum((c - c.diagonal().diag()).square().sum() / len(c) for c in covariances)
    return 25 * (a - b).square().mean() + 25 * variance + covariance


def barlow_twins_of_rows(params, x, y):
    """The same, as it is written for a whole batch."""
    a, b = ((z - z.mean(0)) / z.std(0, correction=0) for z in (embed(params, x), embed(params, y)))
    correlations = a.T @ b / len(a)
    on_diagonal = correlations.diagonal()
    return (on_diagonal - 1).square().sum() + 0.005 * (correlations - on_diagonal.diag()).square().sum()


LOSSES = {"VICReg": (vicreg, vicreg_of_rows), "Barlow Twins": (barlow_twins, barlow_twins_of_rows)}


def problem(rows=30):
    """Parameters, and two views of the same rows."""
    params = {"w": torch.randn(6, 16) / 2, "v": torch.randn(16, 4) / 4}
    x = torch.randn(rows, 6)
    return params, x + torch.randn(rows, 6), x + torch.randn(rows, 6)


def main():
    """Both losses in 7 micro-batches: in two passes, and as they are usually accumulated."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    params, x, y = problem()
    for name, (of_summary, of_rows) in LOSSES.items():
        _, whole = funcga.accumulate(funcga.value_and_grad(of_rows), n=1)(params, x, y)
        _, grads = funcga.coupled(summary_fn, of_summary, n=7, fold=FOLD)(params, x, y)
        _, usual = funcga.accumulate(funcga.value_and_grad(of_rows), n=7)(params, x, y)
        print(f"{name}, gradient in 7 micro-batches against the whole batch: {apart(grads, whole):.0e} in two passes")
        print(f"    the usual way, the mean of the losses of micro-batches: {apart(usual, whole):.0%} off")


if __name__ == "__main__":
    main()
