"""Torch modules of the operators of `wide_resnet.py`: the shortcut travels past the convolutions of its block.

Batch statistics are those of a replica's rows of a micro-batch; there are no running averages, which replicas would
have to exchange.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from models.wide_resnet import WideResNet
from solver_plan.execution.model import Batch, Layer, Model, TensorParallel, Values, whole


class Convolution(nn.Module):
    """A convolution, beside what is carried past it."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, image: torch.Tensor, *carried: torch.Tensor) -> Values:
        """(image, carried) -> (channels, carried)."""
        return self.convolution(image), *carried


class FirstConvolution(Convolution):
    """The first convolution of a block: from here on its input is carried as the shortcut."""

    def forward(self, image: torch.Tensor, *carried: torch.Tensor) -> Values:
        """Image -> (channels, shortcut)."""
        return self.convolution(image), image


class Normalisation(nn.Module):
    """Batch normalisation, rectified within a block."""

    def __init__(self, channels: int, *, rectified: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)
        self.rectified = rectified

    def forward(self, image: torch.Tensor, *carried: torch.Tensor) -> Values:
        """(image, carried) -> the same."""
        normalised = self.norm(image)
        return (nn.functional.relu(normalised) if self.rectified else normalised), *carried


class Shortcut(nn.Module):
    """Adds the shortcut, projected where the shape has changed."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        changes = stride > 1 or channels != out
        self.convolution = nn.Conv2d(channels, out, 1, stride, bias=False) if changes else None

    def forward(self, image: torch.Tensor, shortcut: torch.Tensor) -> Values:
        """(image, shortcut) -> image."""
        return (image + (shortcut if self.convolution is None else self.convolution(shortcut)),)


class Rectified(nn.Module):
    """ReLU."""

    def forward(self, image: torch.Tensor) -> Values:
        """Image -> image."""
        return (nn.functional.relu(image),)


class MaxPool(nn.Module):
    """3 x 3, stride 2."""

    def forward(self, image: torch.Tensor) -> Values:
        """Image -> half as many pixels a side."""
        return (nn.functional.max_pool2d(image, 3, 2, padding=1),)


class AveragePool(nn.Module):
    """Over all pixels."""

    def forward(self, image: torch.Tensor) -> Values:
        """Image -> one number a channel."""
        return (image.mean(dim=(2, 3)),)


class Classifier(nn.Module):
    """Logits of the classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, features: torch.Tensor) -> Values:
        """Features -> logits."""
        return (self.linear(features),)


class OutputChannels(ParallelStyle):
    """Divides the output channels of a convolution among tensor ranks and gathers them behind it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Conv2d), module
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        stride, padding = module.stride, module.padding

        def forward(image: torch.Tensor) -> torch.Tensor:
            # the gradient of the whole input is the sum of what each rank's channels give
            entering = DTensor.from_local(image, device_mesh, [Replicate()], run_check=False)
            channels = nn.functional.conv2d(
                entering.to_local(grad_placements=[Partial()]), module.weight.to_local(), None, stride, padding
            )
            leaving = DTensor.from_local(channels, device_mesh, [Shard(1)], run_check=False)
            return leaving.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward  # type: ignore[method-assign]
        return module


def _channels(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"convolution": OutputChannels()})


def _classes(tensor_parallel: int, partition: int) -> TensorParallel:
    return TensorParallel({"linear": ColwiseParallel(output_layouts=Replicate())})


def wide_resnet(shape: WideResNet) -> Model:
    """Return the modules of a Wide-ResNet, trained to classify random images."""
    convolution = partial(_layer, split=_channels)
    layers = [
        convolution("conv1", partial(Convolution, 3, shape.base, 7, 2)),
        _layer("bn1", partial(Normalisation, shape.base, rectified=False)),
        _layer("relu1", Rectified),
        _layer("maxpool", MaxPool),
    ]
    channels = shape.base
    for stage, count in enumerate(shape.blocks):
        planes = shape.base * 2**stage
        wide, out = shape.widening * planes, 4 * planes
        for index in range(count):
            name, stride = f"block{stage}.{index}", 2 if stage > 0 and index == 0 else 1
            projected = stride > 1 or channels != out
            layers += [
                convolution(f"{name}.conv1", partial(FirstConvolution, channels, planes, 1)),
                _layer(f"{name}.bn1", partial(Normalisation, planes, rectified=True)),
                convolution(f"{name}.conv2", partial(Convolution, planes, wide, 3, stride)),
                _layer(f"{name}.bn2", partial(Normalisation, wide, rectified=True)),
                convolution(f"{name}.conv3", partial(Convolution, wide, out, 1)),
                _layer(f"{name}.bn3", partial(Normalisation, out, rectified=False)),
                _layer(f"{name}.shortcut", partial(Shortcut, channels, out, stride), _channels if projected else whole),
                _layer(f"{name}.relu", Rectified),
            ]
            channels = out
    layers += [
        _layer("avgpool", AveragePool),
        _layer("classifier", partial(Classifier, channels, shape.classes), _classes),
    ]
    return Model(tuple(layers), _class_loss, partial(_random_images, shape))


def _layer(
    name: str, build: Callable[[], nn.Module], split: Callable[[int, int], TensorParallel | None] = whole
) -> Layer:
    return Layer(name, build, split)


def _class_loss(outputs: Values, targets: Values) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0], targets[0], reduction="sum")


def _random_images(shape: WideResNet, samples: int, generator: torch.Generator) -> Batch:
    images = torch.randn(samples, 3, shape.image, shape.image, generator=generator)
    return Batch((images,), (torch.randint(shape.classes, (samples,), generator=generator),))
