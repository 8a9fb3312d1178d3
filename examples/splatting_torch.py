"""Gaussian splatting with several views an update: L1 + D-SSIM, and the densification statistics of every view.

    python examples/splatting_torch.py

The loss of an update is the mean over its views, which may differ in size. A view is a micro-batch, and the usual loop,
(loss / n).backward(), has the right gradient. Its densification statistics are wrong, though. A Gaussian is split if
the norm of the gradient by its screen position is above a threshold, on average over the views that see it. In that
loop each of these gradients is divided by n, so fewer Gaussians are split. The norm of their sum is another number
again, as gradients of different views cancel.

Here an offset of zeros is added to the screen positions. It is an argument of the loss, so its gradient in a view is
that of the screen positions. Beside the mean gradient, `sum()` folds the norms and how many views see each Gaussian,
and `max()` its largest radius.
"""

import torch
from by_hand import apart
from torch import nn
from torch.nn.functional import avg_pool2d

import funcga
import torch_backend

GAUSSIANS, VIEWS, THRESHOLD = 40, 6, 0.001


def splats(count=GAUSSIANS):
    """The parameters by name, as gsplat has them."""
    return nn.ParameterDict(
        {
            "means": torch.randn(count, 3) / 2,
            "scales": torch.full((count,), -1.6) + 0.3 * torch.randn(count),
            "opacities": torch.randn(count),
            "colors": torch.randn(count, 3),
        }
    )


def render(params, camera, size, offset=0.0):
    """(the image [height, width, 3], and of each Gaussian whether it is seen, and its radius on the screen)."""
    height, width = size
    x, y, depth = (params["means"] @ camera["rotation"].T + camera["position"]).unbind(1)
    screen = torch.stack([width / 2 + width * x / depth, height / 2 + width * y / depth], 1) + offset
    radii = params["scales"].exp() * width / depth
    inside = ((screen > -radii[:, None]) & (screen < screen.new_tensor([width, height]) + radii[:, None])).all(1)
    seen = inside & (depth > 0.2)
    order = torch.where(seen)[0][depth[seen].argsort()]  # from front to back
    rows, columns = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    pixels = torch.stack([columns, rows], 2)[None]
    squares = (pixels - screen[order, None, None]).square().sum(3) / radii[order, None, None].square()
    alphas = 0.99 * params["opacities"][order, None, None].sigmoid() * (-squares / 2).exp()
    through = torch.cat([torch.ones_like(alphas[:1]), (1 - alphas).cumprod(0)[:-1]])
    image = torch.einsum("nhw,nc->hwc", alphas * through, params["colors"][order].sigmoid())
    return image, seen, radii


def ssim(a, b):
    """The mean structural similarity of two images, in windows of 5 x 5 pixels."""
    a, b = a.movedim(2, 0), b.movedim(2, 0)
    mean = lambda image: avg_pool2d(image, 5, 1)
    of_a, of_b = mean(a), mean(b)
    variances = mean(a * a) - of_a**2 + mean(b * b) - of_b**2
    covariance, c1, c2 = mean(a * b) - of_a * of_b, 0.01**2, 0.03**2
    return ((2 * of_a * of_b + c1) * (2 * covariance + c2) / ((of_a**2 + of_b**2 + c1) * (variances + c2))).mean()


def loss_fn(params, offset, view):
    """0.8 L1 + 0.2 D-SSIM of one view, and what it sees."""
    image, seen, radii = render(params, view["camera"], view["image"].shape[:2], offset)
    loss = 0.8 * (image - view["image"]).abs().mean() + 0.2 * (1 - ssim(image, view["image"]))
    return loss, {"seen": seen, "radii": radii.detach() * seen}


def of_view(params, offset, view):
    """The loss and the gradient of a view, and its statistics."""
    (loss, statistics), (grads, screen) = gradient(params, offset, view)
    return loss, grads, {"norms": screen.norm(dim=1), **statistics}


gradient = funcga.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
FOLD = (funcga.mean(), funcga.mean(), {"norms": funcga.sum(), "seen": funcga.sum(), "radii": funcga.max()})


def of_batch(params, views):
    """The gradient of the mean loss of all views, that of each view by screen positions, and what each view sees."""
    offsets = torch.zeros(len(views), GAUSSIANS, 2, requires_grad=True)
    losses, seen = zip(*map(loss_fn, [params] * len(views), offsets, views), strict=True)
    *grads, screen = torch.autograd.grad(sum(losses) / len(views), [*params.values(), offsets])
    return dict(zip(params.keys(), grads, strict=True)), len(views) * screen, seen


def by_hand(params, views):
    """The gradient that `(loss / n).backward()` leaves."""
    params.zero_grad()
    for view in views:
        (loss_fn(params, 0.0, view)[0] / len(views)).backward()
    return {name: p.grad for name, p in params.items()}


def views(truth):
    """Pictures of the true Gaussians from cameras around them, not all of one size."""
    pictures = []
    for view in range(VIEWS):
        angle = torch.tensor(2 * torch.pi * view / VIEWS)
        cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros(()), torch.ones(())
        rotation = torch.stack([cos, zero, sin, zero, one, zero, -sin, zero, cos]).view(3, 3)
        camera = {"rotation": rotation, "position": torch.tensor([0.0, 0.0, 1.5])}
        size = (24, 24) if view % 2 else (18, 32)
        pictures.append({"camera": camera, "image": render(truth, camera, size)[0].detach()})
    return pictures


def main(updates=30):
    """One update against autograd on all views, and some training."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    window, params, offset = views(splats()), splats(), torch.zeros(GAUSSIANS, 2)
    # A view has no rows to count: all weigh the same.
    step = funcga.stream(of_view, fold=FOLD, in_axes=(None, None, 0), weight=lambda view: 1)
    _, grads, statistics = step(torch_backend.trainable(params), offset, window)

    whole, screen, of_views = of_batch(params, window)
    norms = {"norms": screen.norm(dim=2).sum(0)}
    print(f"the gradient of the mean of {VIEWS} views: off by {apart(grads, whole):.0e}")
    print(f"    the usual loop, (loss / n).backward(): {apart(by_hand(params, window), whole):.0e}")
    print(f"the norms of each view's screen gradient, summed: off by {apart(statistics, norms):.0e}")
    print(f"    the norm of the summed screen gradients: {apart({'norms': screen.sum(0).norm(dim=1)}, norms):.0%}")
    expected = sum(view["seen"] for view in of_views), torch.stack([view["radii"] for view in of_views]).amax(0)
    equal = all(map(torch.equal, (statistics["seen"], statistics["radii"]), expected))
    print(f"how many views see each Gaussian, and its largest radius, are equal: {equal}")
    per_view = statistics["norms"] / statistics["seen"].clamp(min=1)
    above, by_loop = (int((norms > THRESHOLD).sum()) for norms in (per_view, per_view / VIEWS))
    print(f"{above} of {GAUSSIANS} Gaussians are to be split; after (loss / n).backward() it would be {by_loop}")

    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.03, "name": name} for name, p in params.items()])
    for update in range(updates):
        loss, grads, _ = step(torch_backend.trainable(params), offset, window)
        torch_backend.assign_grads(params, grads)
        optimizer.step()
        if update in (0, updates - 1):
            print(f"update {update + 1:2}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
