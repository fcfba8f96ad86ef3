"""Error measures, and the one table of their bounds.

The yardstick is float64 math on the same inputs upcast. Errors are relative to that reference, so
that a bound means the same for every shape and scale, and an output of zeros has the error 1. A
kernel is held to a multiple of the error that eager PyTorch makes on the same inputs in the same
dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Errors:
    """How far an output is from its reference.

    Attributes:
        max: the largest error of an element, relative to that element or to the RMS of the
            reference, whichever is larger: the rounding of a large element is large.
        rms: the RMS of the errors, relative to the RMS of the reference.
    """

    max: float
    rms: float


@dataclass(frozen=True)
class Bound:
    """The error allowed: `factor` times that of eager PyTorch, plus `slack` of the reference.

    The largest of n errors moves more from draw to draw than their RMS, so eager's largest is
    given `peak` of eager's RMS on top; one wrong element in a million is far beyond it.
    """

    factor: float
    slack: float = 1e-6
    peak: float = 2.0

    def limits(self, eager: Errors) -> Errors:
        """The largest errors allowed beside those of eager PyTorch."""
        return Errors(
            max=self.factor * (eager.max + self.peak * eager.rms) + self.slack,
            rms=self.factor * eager.rms + self.slack,
        )


BOUNDS = {
    "op": Bound(factor=2),  # one kernel
    "model": Bound(factor=3),  # logits and the outputs of layers, where errors pile up
    "copy": Bound(factor=0, slack=0),  # what is moved and not computed
}


def rms(x: Tensor) -> float:
    """Root of the mean square, in float64."""
    return x.double().square().mean().sqrt().item()


def measure(output: Tensor, reference: Tensor) -> Errors:
    """Errors of `output`, any dtype, against a finite float64 `reference` of its shape.

    A NaN in the output gives NaN errors, which are within no bound. Raises ValueError if the shapes
    differ or the reference is not float64.
    """
    if output.shape != reference.shape or reference.dtype != torch.float64:
        shapes = f"{tuple(output.shape)} against {tuple(reference.shape)}, {reference.dtype}"
        raise ValueError(f"expected one shape and a float64 reference, not {shapes}")
    error = output.double() - reference
    scale = rms(reference) or 1.0
    largest = (error.abs() / reference.abs().clamp(min=scale)).max()
    return Errors(max=largest.item(), rms=rms(error) / scale)


def measure_elementwise(output: Tensor, reference: Tensor, floor: float) -> Errors:
    """Errors of the elements, each relative to itself, where the reference is at least `floor`.

    It sees what `measure` cannot: probabilities that are wrong and far below the largest ones.
    """
    large = reference.abs() >= floor
    return measure(output.double()[large] / reference[large], torch.ones_like(reference[large]))


def within(errors: Errors, limits: Errors) -> bool:
    """Whether both errors are within their limits; NaN never is."""
    return errors.max <= limits.max and errors.rms <= limits.rms
