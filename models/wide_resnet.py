"""Wide-ResNet of bottleneck blocks on images of 224 x 224, 32-bit with Adam.

Sizes: Zagoruyko and Komodakis (2016), in the variants of Aceso's evaluation (EuroSys 2024). Stage s has blocks of three
convolutions, with p = base * 2^s: 1 x 1 to p channels, 3 x 3 to widening * p, 1 x 1 to 4 p. A convolution is a matrix
product with one row for each output pixel; tensor parallelism divides its output channels and gathers them behind it.
"""

from dataclasses import dataclass
from functools import partial

from solver_plan.profiles.description import (
    ADAM_32_BIT,
    Collective,
    MatrixProduct,
    MemoryPass,
    ModelDescription,
    OperatorDescription,
    Partition,
    Size,
)

ELEMENT = 4
"""Bytes of an element: 32-bit training."""
WINOGRAD_TAPS = 4
"""Multiplications for each output of a 3 x 3 convolution with minimal filtering, 16 for a tile of 2 x 2 outputs instead
of 9 each (Lavin and Gray 2016); it needs stride 1."""


@dataclass(frozen=True, kw_only=True)
class WideResNet:
    """Shape of a Wide-ResNet."""

    name: str
    base: int
    widening: int = 2
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    classes: int = 1024


def wide_resnet_500m() -> ModelDescription:
    """50 layers, base width 224."""
    return describe(WideResNet(name="wide-resnet-500M", base=224))


def wide_resnet_2b() -> ModelDescription:
    """50 layers, base width 448."""
    return describe(WideResNet(name="wide-resnet-2B", base=448))


def wide_resnet_4b() -> ModelDescription:
    """50 layers, base width 640."""
    return describe(WideResNet(name="wide-resnet-4B", base=640))


def wide_resnet_6_8b() -> ModelDescription:
    """50 layers, base width 320, 16 times as wide inside."""
    return describe(WideResNet(name="wide-resnet-6.8B", base=320, widening=16))


def wide_resnet_13b() -> ModelDescription:
    """101 layers, base width 320, 16 times as wide inside."""
    return describe(WideResNet(name="wide-resnet-13B", base=320, widening=16, blocks=(3, 4, 23, 3)))


def tiny() -> ModelDescription:
    """Two blocks on small images, for tests."""
    return describe(WideResNet(name="wide-resnet-tiny", base=8, blocks=(1, 1), image=32, classes=16))


def describe(shape: WideResNet) -> ModelDescription:
    """Return the description: stem of 4 operators, 8 operators a block, pooling and the classifier."""
    pixels = shape.image // 2
    operators = [
        _operator("conv1", _convolution(3, shape.base, pixels, kernel=7, from_pixels=shape.image), block_start=True),
        _operator("bn1", _normalisation(shape.base, pixels)),
        _operator("relu1", _activation(shape.base, pixels)),
        _operator("maxpool", _pooling(shape.base, pixels)),
    ]
    pixels //= 2
    channels = shape.base
    for stage, count in enumerate(shape.blocks):
        planes = shape.base * 2**stage
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            operators += _block(f"block{stage}.{index}", channels, planes, shape.widening, pixels, stride)
            channels, pixels = 4 * planes, pixels // stride
    operators += [
        _operator("avgpool", _global_pooling(channels, pixels)),
        _operator("classifier", _classifier(channels, shape.classes)),
    ]
    return ModelDescription(
        name=shape.name,
        data_type="float32",
        input_bytes=3 * shape.image**2 * ELEMENT,
        operators=tuple(operators),
        tensor_parallel_divides=shape.base,
        bytes_per_parameter=ADAM_32_BIT,
        modules=partial(_modules, shape),
    )


def _modules(shape: WideResNet) -> object:
    from models.wide_resnet_modules import wide_resnet

    return wide_resnet(shape)


def _operator(name: str, partition: Partition, *, block_start: bool = False) -> OperatorDescription:
    return OperatorDescription(name=name, kind=name, block_start=block_start, partitions=(partition,))


def _block(name: str, channels: int, planes: int, widening: int, pixels: int, stride: int) -> list[OperatorDescription]:
    """Three convolutions, each normalised and rectified; the shortcut, carried past them, is added at the end."""
    wide, out, smaller = widening * planes, 4 * planes, pixels // stride
    shortcut = Size(whole=channels * pixels**2 * ELEMENT)
    projected = stride > 1 or channels != out
    added = _convolution(channels, out, smaller, kernel=1, from_pixels=pixels) if projected else _copy(out, smaller)
    leaving = Size(whole=out * smaller**2 * ELEMENT)
    parts = [
        ("conv1", _convolution(channels, planes, pixels, kernel=1, carried=shortcut)),
        ("bn1", _normalisation(planes, pixels, carried=shortcut)),
        ("conv2", _convolution(planes, wide, smaller, kernel=3, from_pixels=pixels, carried=shortcut)),
        ("bn2", _normalisation(wide, smaller, carried=shortcut)),
        ("conv3", _convolution(wide, out, smaller, kernel=1, carried=shortcut)),
        ("bn3", _normalisation(out, smaller, carried=shortcut)),
    ]
    operators = [_operator(f"{name}.{kind}", partition, block_start=kind == "conv1") for kind, partition in parts]
    joined = Partition(
        products=added.products,
        passes=added.passes,
        backward_collectives=added.backward_collectives,
        forward_collectives=added.forward_collectives,
        weights=added.weights,
        kept=leaving,
        output=leaving,
        forward_workspace=added.forward_workspace,
        backward_workspace=added.backward_workspace,
    )
    return [*operators, _operator(f"{name}.shortcut", joined), _operator(f"{name}.relu", _activation(out, smaller))]


def _convolution(
    channels: int,
    out: int,
    pixels: int,
    *,
    kernel: int,
    from_pixels: int | None = None,
    carried: Size | None = None,
) -> Partition:
    entering = channels * (from_pixels or pixels) ** 2 * ELEMENT
    taps = WINOGRAD_TAPS if kernel == 3 and from_pixels in (None, pixels) else kernel**2
    leaving = out * pixels**2 * ELEMENT
    return Partition(
        products=(MatrixProduct(rows=pixels**2, inner=channels * taps, columns=out, split="columns"),),
        passes=MemoryPass(forward=Size(whole=entering, sharded=leaving), backward=Size(whole=2 * entering)),
        forward_collectives=(Collective(kind="all_gather", size=leaving),),
        backward_collectives=(Collective(kind="all_reduce", size=entering),),
        weights=Size(sharded=out * channels * kernel**2 * ELEMENT),
        kept=Size(whole=leaving),
        output=Size(whole=leaving) + (carried or Size()),
        forward_workspace=Size(sharded=leaving),
        backward_workspace=Size(whole=entering + leaving),
    )


def _normalisation(channels: int, pixels: int, carried: Size | None = None) -> Partition:
    """Batch normalisation with rectification, in place: its input serves the backward."""
    size = channels * pixels**2 * ELEMENT
    return Partition(
        passes=MemoryPass(forward=Size(whole=3 * size), backward=Size(whole=5 * size)),
        forward_kernels=2,
        backward_kernels=3,
        weights=Size(whole=2 * channels * ELEMENT),
        output=Size(whole=size) + (carried or Size()),
        backward_workspace=Size(whole=2 * size),
    )


def _activation(channels: int, pixels: int) -> Partition:
    size = channels * pixels**2 * ELEMENT
    return Partition(
        passes=MemoryPass(forward=Size(whole=2 * size), backward=Size(whole=3 * size)),
        kept=Size(whole=size),
        output=Size(whole=size),
        backward_workspace=Size(whole=2 * size),
    )


def _copy(channels: int, pixels: int) -> Partition:
    size = channels * pixels**2 * ELEMENT
    return Partition(passes=MemoryPass(forward=Size(whole=3 * size)), forward_workspace=Size(whole=size))


def _pooling(channels: int, pixels: int) -> Partition:
    """3 x 3 pooling with stride 2; the backward scatters by indices of 8 bytes."""
    size = channels * pixels**2 * ELEMENT
    return Partition(
        passes=MemoryPass(forward=Size(whole=size * 3 // 2), backward=Size(whole=4 * size)),
        kept=Size(whole=size * 3 // 4),
        output=Size(whole=size // 4),
        backward_workspace=Size(whole=size * 5 // 4),
    )


def _global_pooling(channels: int, pixels: int) -> Partition:
    size = channels * pixels**2 * ELEMENT
    return Partition(
        passes=MemoryPass(forward=Size(whole=size), backward=Size(whole=size)),
        kept=Size(whole=channels * ELEMENT),
        output=Size(whole=channels * ELEMENT),
        backward_workspace=Size(whole=size),
    )


def _classifier(channels: int, classes: int) -> Partition:
    """Linear layer and cross-entropy."""
    return Partition(
        products=(MatrixProduct(rows=1, inner=channels, columns=classes, split="columns"),),
        forward_kernels=8,
        backward_kernels=10,
        forward_collectives=(Collective(kind="all_gather", size=classes * ELEMENT),),
        backward_collectives=(Collective(kind="all_reduce", size=channels * ELEMENT),),
        weights=Size(sharded=classes * (channels + 1) * ELEMENT),
        kept=Size(whole=classes * ELEMENT),
    )
