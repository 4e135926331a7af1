"""What calibration tells about one linear layer: second moments of its inputs, a few tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Columns of the second moments that are summed at once: what lies above a strip's square is its mirror image.
STRIP = 256


class InputStatistics:
    """Moments of the inputs [T, K] that a linear layer saw.

    ``hessian``    float32 [K, K]: sum of x x^T / T over the inputs as they are in the quantized model.
    ``deviation``  float32 [K, K] or None: sum of (x_original - x) x^T / T, what the layers before it did to the inputs.
    ``mean_abs``, ``max_abs``  float32 [K].
    Without products there is no ``hessian``.
    """

    def __init__(
        self,
        in_features: int,
        device: torch.device | str = "cpu",
        *,
        with_products: bool = True,
        with_deviation: bool = False,
    ) -> None:
        self.num_tokens = 0
        size = in_features if with_products else 0
        self._products = torch.zeros(size, size, device=device)
        self._deviations = torch.zeros_like(self._products) if with_deviation else None
        self._sum_abs = torch.zeros(in_features, device=device)
        self.max_abs = torch.zeros(in_features, device=device)

    def add(self, x: Tensor, original: Tensor | None = None) -> None:
        """Take in inputs [..., K], with those of the unquantized model where deviations are kept."""
        x = x.reshape(-1, x.shape[-1]).float()
        self.num_tokens += x.shape[0]
        for start in range(0, len(self._products), STRIP):
            end = start + STRIP
            self._products[start:, start:end].addmm_(x[:, start:].T, x[:, start:end])
        magnitude = x.abs()
        self._sum_abs += magnitude.sum(0)
        if x.shape[0]:
            self.max_abs = torch.maximum(self.max_abs, magnitude.amax(0))
        if self._deviations is not None:
            assert original is not None, "deviations need the original inputs"
            self._deviations.addmm_((original.reshape(x.shape).float() - x).T, x)

    @property
    def hessian(self) -> Tensor:
        lower = self._products.tril()
        return (lower + lower.tril(-1).T) / max(self.num_tokens, 1)

    @property
    def deviation(self) -> Tensor | None:
        return None if self._deviations is None else self._deviations / max(self.num_tokens, 1)

    @property
    def mean_abs(self) -> Tensor:
        return self._sum_abs / max(self.num_tokens, 1)
