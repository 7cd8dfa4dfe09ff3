"""The reference of a comparison: a model in torch, run with the memory of one of its parts at a time.

It is built without weights. Each part's are read from the checkpoint's files when it is about to run and dropped when
it has, so that a model is run on a machine that cannot hold it. What each part returned is kept, and beside it how far
the same part with the same input is from it in float64: the yardstick for what may differ at all.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, DiffusionError
from ..layerwise import block_of
from ..spec import DiffusionSpec
from .find import Found, mask_makers, quiet, said, silenced
from .hf import Files, Source, is_computed
from .trace import Stage, Trace

if TYPE_CHECKING:
    import torch
    from torch import nn

Dtype = Literal["float32", "checkpoint"]
Yardstick = Literal["float64", "mps", "none"]

_REACH = 8  # columns of the canvas on which bidirectional attention is checked
_SAME = 1e-2  # relative: two types of number are no further apart
_REACHED = 1e-5  # of the states' spread: what another token changes at least; rounding changes less


# The model without weights, and its parts.


@dataclass(frozen=True)
class _Slot:
    """A parameter, or a stored buffer, of a module."""

    owner: nn.Module
    name: str
    full: str
    source: Source
    empty: Any


@dataclass
class _Skeleton:
    """
    A model on torch's meta device, with real buffers.

    Args:
        layers: its decoder layers.
        outer: modules outside of them that have parameters or buffers of their own.
        slots: the weights of each layer and outer module.
        free: modules outside of the layers without parameters, such as those that make the angles of a rope.
        exact: buffers that the modules have computed in float64, by module and name.
    """

    model: Any
    layers: list[Any]
    outer: list[Any]
    free: list[Any]
    slots: dict[Any, list[_Slot]] = field(default_factory=dict)
    exact: dict[tuple[Any, str], Any] = field(default_factory=dict)


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters of modules made in here take no memory; what the modules compute for themselves (buffers) is real."""
    import torch
    from torch import nn

    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A structure of tensors with each tensor changed."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a structure."""
    found: list[torch.Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _first(value: Any) -> torch.Tensor:
    """The hidden states among what a layer takes or returns."""
    found: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return found


def _checked(part: str, value: Any, length: int | None) -> torch.Tensor:
    """
    What a part of the reference has made.

    Args:
        part: its name.
        value: [1, T, D] or [T, D], if all is well.
        length: T; None: any.

    Raises:
        DiffusionError: something else, or numbers that are not finite.
    """
    import torch

    other = "give another modeling file with --reference FILE."
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.ndim < 2:
        kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise DiffusionError(f"{part} of the reference is {kind}, not numbers for each token: {other}")
    rows = value.shape[:-1].numel()
    if length is not None and rows != length:
        raise DiffusionError(f"{part} of the reference is of {rows} tokens, not of the canvas's {length}: {other}")
    if not bool(value.isfinite().all()):
        raise DiffusionError(
            f"{part} of the reference has numbers that are not finite in {str(value.dtype).removeprefix('torch.')}: "
            f"look for such weights, leave out --dtype checkpoint, or {other}"
        )
    return value


class _Stop(Exception):
    """Ends a forward when all that is wanted of it is there."""


class _Loader:
    """Gives parts their weights and takes them away, and counts the bytes that are there at once."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.live = self.peak = 0
        self.reading = False

    def read(self, slot: _Slot, dtype: torch.dtype | None, device: str) -> torch.Tensor:
        self.reading = True
        try:
            return slot.source.load(dtype).to(device)
        finally:
            self.reading = False

    def mode(self, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """A context in which functions of torch are called through ``change(function, args, kwargs)``, but while
        weights are read."""
        from torch.overrides import TorchFunctionMode

        loader = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                return func(*args, **(kwargs or {})) if loader.reading else change(func, args, kwargs or {})

        return Mode()

    def put(self, slot: _Slot, value: Any) -> None:
        from torch import nn

        kind = slot.owner._parameters if slot.name in slot.owner._parameters else slot.owner._buffers
        before = kind[slot.name]
        self.live += _bytes(value)
        self.peak = max(self.peak, self.live)
        self.live -= _bytes(before)
        is_new = kind is slot.owner._parameters and value is not slot.empty
        kind[slot.name] = nn.Parameter(value, requires_grad=False) if is_new else value

    def load(self, slots: Sequence[_Slot], dtype: torch.dtype | None, device: str = "cpu") -> None:
        for slot in slots:
            self.put(slot, self.read(slot, dtype, device))
        self.files.close()  # or its pages would count as memory of this process

    def drop(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            self.put(slot, slot.empty)


def _bytes(value: Any) -> int:
    return 0 if value.is_meta else value.numel() * value.element_size()


@dataclass(frozen=True)
class _Precision:
    """What the yardstick is computed in: float64, or what the reference is in on another device."""

    device: str = "cpu"
    wide: bool = True

    def cast(self, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.device)
        return value.double() if self.wide and value.is_floating_point() else value

    @contextlib.contextmanager
    def buffers(self, modules: Sequence[Any], skeleton: _Skeleton) -> Iterator[None]:
        """The modules' buffers as they are in float64 when the modules compute them so, else cast; as they were
        afterwards."""
        kept = [(m, name, value) for m in modules for name, value in m._buffers.items() if value is not None]
        for module, name, value in kept:
            exact = skeleton.exact.get((module, name)) if self.wide else None
            module._buffers[name] = self.cast(value) if exact is None else exact
        try:
            yield
        finally:
            for module, name, value in kept:
                module._buffers[name] = value

    @contextlib.contextmanager
    def active(self, loader: _Loader) -> Iterator[None]:
        """What modules make for themselves is made in float64, or on the device."""
        import torch

        if not self.wide:
            with torch.device(self.device):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with loader.mode(_in_float64):
                yield
        finally:
            torch.set_default_dtype(before)


def _in_float64(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms, softmaxes and routers of transformers go to float32 for themselves, which would hide what they round."""
    import torch

    if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
        return args[0].double()
    narrow = (torch.float32, torch.float16, torch.bfloat16)

    def widened(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in narrow else value

    return func(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()})


class _Lent:
    """What is done with every function of torch. Parameters that another module uses than the one that has them, such
    as the embedding as a head, are read for that one use."""

    def __init__(self, visitor: _Visitor):
        self.slots = {id(slot.empty): slot for slots in visitor.skeleton.slots.values() for slot in slots}
        self.loader, self.dtype, self.device = visitor.loader, visitor.dtype, visitor.device
        self.picks = visitor.picks

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        if getattr(func, "__name__", "") == "__get__":
            value = func(*args, **kwargs)
            asked = getattr(func, "__self__", None) is torch.Tensor.device
            return torch.device(self.device) if asked and id(args[0]) in self.slots else value
        if func in (torch.topk, torch.Tensor.topk):
            chosen = func(*args, **kwargs)
            self.picks(chosen.indices)
            return chosen
        if not any(id(value) in self.slots for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        lent: list[int] = []

        def read(value: Any) -> Any:
            if id(value) not in self.slots:
                return value
            value = self.loader.read(self.slots[id(value)], self.dtype, self.device)
            lent.append(_bytes(value))
            self.loader.live += lent[-1]
            self.loader.peak = max(self.loader.peak, self.loader.live)
            return value

        try:
            return func(*map(read, args), **{key: read(value) for key, value in kwargs.items()})
        finally:
            self.loader.live -= sum(lent)
            self.loader.files.close()


# What is done on the way through the model.


class _Visitor(ABC):
    """Sees every layer and outer module before and after it runs, with weights of a type (None: as stored)."""

    def __init__(self, skeleton: _Skeleton, loader: _Loader, dtype: torch.dtype | None, device: str = "cpu"):
        self.skeleton, self.loader, self.dtype, self.device = skeleton, loader, dtype, device
        self.number = {layer: i for i, layer in enumerate(skeleton.layers)}
        self.handles: list[Any] = []

    @abstractmethod
    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pre-hook of torch."""

    @abstractmethod
    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A hook of torch."""

    def picks(self, indices: torch.Tensor) -> None:
        """Told what every topk has chosen."""
        return None  # most do not ask

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        parts = [*self.skeleton.layers, *self.skeleton.outer]
        self.handles = [part.register_forward_pre_hook(self.enter, with_kwargs=True) for part in parts]
        self.handles += [part.register_forward_hook(self.leave, with_kwargs=True) for part in parts]
        try:
            yield
        finally:
            for handle in self.handles:
                handle.remove()
            for part in parts:
                self.loader.drop(self.skeleton.slots[part])


class _Probe(_Visitor):
    """Runs the first layer only."""

    states: Any = None

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.loader.load(self.skeleton.slots[module], self.dtype)

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        self.loader.drop(self.skeleton.slots[module])
        if module is self.skeleton.layers[0]:
            self.states = _checked("layer 0", _first(out), None)[0]
            raise _Stop


class _Recorder(_Visitor):
    """Keeps what every part returns, and computes the yardstick of each layer."""

    def __init__(
        self,
        skeleton: _Skeleton,
        loader: _Loader,
        dtype: torch.dtype | None,
        precision: _Precision | None,
        top_k: int | None,
        length: int,
        on_stage: Callable[[str], None],
    ):
        super().__init__(skeleton, loader, dtype)
        self.precision, self.top_k, self.length, self.on_stage = precision, top_k, length, on_stage
        self.embedding: Any = None
        self.layers: list[Stage] = []
        self.returned: Any = None  # of the last layer, as it returned it
        self.norm_module: Any = None
        self.norm: Any = None
        self.again = False  # the yardstick is being computed
        self.inputs: Any = None
        self.experts: Any = None  # [T, K] that the layer has chosen
        self.picked: Any = None  # what its last topk has
        self.exact: dict[int, tuple[Any, Any]] = {}  # what free modules made, and that in the yardstick, by id

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.again:
            return
        self.loader.load(self.skeleton.slots[module], self.dtype)
        if module not in self.number:
            if len(self.layers) == len(self.skeleton.layers) and self.norm_module is None:
                self.norm_module = module
            return
        if self.embedding is None:
            self.embedding = _checked("embedding", _entering(args, kwargs), self.length).clone()
            self.on_stage("embedding")
        states = _entering(args, kwargs)

        def kept(value: torch.Tensor) -> torch.Tensor:
            made, exact = self.exact.get(id(value), (None, value))
            return exact.clone() if made is value and value is not states else value.clone()

        self.inputs = _mapped((args, kwargs), kept)
        self.experts = self.picked = None
        if self.top_k is not None:
            self.handles += [
                part.register_forward_hook(self._look_for_experts, with_kwargs=True)
                for part in module.modules()
                if part is not module
            ]

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if self.again:
            return
        if module in self.number:
            states, experts = _checked(f"layer {self.number[module]}", _first(out), self.length), self._chosen()
            self.returned = _mapped(out, lambda value: value.clone())
            rounding = self._rounding(module, states, experts) if self.precision is not None else None
            self.layers.append(Stage(_numbers(states), rounding, None if experts is None else experts.cpu().numpy()))
            self.on_stage(f"layer {self.number[module]}")
        elif module is self.norm_module and self.norm is None:
            self.norm = _checked("norm", _first(out), self.length).clone()
            self.on_stage("norm")
        self.loader.drop(self.skeleton.slots[module])

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        with super().attached():
            if self.precision is not None:
                self.handles += [
                    part.register_forward_hook(self._make_exactly, with_kwargs=True) for part in self.skeleton.free
                ]
            yield

    def _make_exactly(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What layers are given beside the states, such as the angles of a rope, is made here and there: what it is
        rounded by, which grows with the position, belongs to the yardstick."""
        if self.again or len(self.layers) == len(self.skeleton.layers):
            return
        assert self.precision is not None
        args, kwargs = _mapped((args, kwargs), self.precision.cast)
        self.again = True
        try:
            with self.precision.buffers([module], self.skeleton), self.precision.active(self.loader):
                exact = module(*args, **kwargs)
        finally:
            self.again = False
        for made, wide in zip(_tensors(out), _tensors(exact), strict=True):
            self.exact[id(made)] = (made, wide)

    def _rounding(self, module: Any, states: Any, experts: Any) -> tuple[float, float] | None:
        """The layer once more, with the same input, in what the yardstick is computed in."""
        assert self.precision is not None
        for slot in self.skeleton.slots[module]:
            value = slot.owner._parameters.get(slot.name)
            if value is not None:
                self.loader.put(slot, self.precision.cast(value))
        args, kwargs = _mapped(self.inputs, self.precision.cast)
        self.inputs = self.experts = self.picked = None
        self.again = True
        try:
            with self.precision.buffers(list(module.modules()), self.skeleton), self.precision.active(self.loader):
                exact = _first(module(*args, **kwargs))
        finally:
            self.again = False
        same, others = None, self._chosen()
        if experts is not None and others is not None:
            same = (experts.sort(-1)[0] == others.cpu().sort(-1)[0]).all(-1)
        return _difference(exact, states, same)

    def _chosen(self) -> Any:
        """The experts that the layer has chosen: those that one of its modules took or returned, else those of a topk
        between its modules."""
        return self.picked if self.experts is None else self.experts

    def _look_for_experts(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        def look(value: torch.Tensor) -> torch.Tensor:
            if self.experts is None and self._are_experts(value):
                self.experts = value.detach().reshape(self.length, -1)
            return value

        _mapped((args, kwargs, out), look)

    def picks(self, indices: torch.Tensor) -> None:
        if self.top_k is not None and self._are_experts(indices):
            self.picked = indices.detach().reshape(self.length, -1)

    def _are_experts(self, value: torch.Tensor) -> bool:
        whole = not (value.is_floating_point() or value.is_complex()) and value.ndim > 1
        return whole and value.shape[-1] == self.top_k and value.numel() == self.length * value.shape[-1]


class _Outside(_Visitor):
    """The yardstick of what is outside of the layers: their place is taken by what the last one has returned."""

    def __init__(self, skeleton: _Skeleton, loader: _Loader, recorder: _Recorder, precision: _Precision):
        import torch

        super().__init__(skeleton, loader, torch.float64 if precision.wide else recorder.dtype, precision.device)
        self.recorder, self.precision = recorder, precision
        self.embedding: Any = None
        self.norm: Any = None
        self.open: dict[Any, Any] = {}

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if module in self.number:
            if self.embedding is None:
                self.embedding = _entering(args, kwargs).clone()
            return
        self.loader.load(self.skeleton.slots[module], self.dtype, self.device)
        self.open[module] = self.precision.buffers([module], self.skeleton)
        self.open[module].__enter__()

    def leave(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        if module in self.number:
            return None
        self.open.pop(module).__exit__(None, None, None)
        self.loader.drop(self.skeleton.slots[module])
        if module is self.recorder.norm_module and self.norm is None:
            self.norm = _first(out).clone()
            return self.precision.cast(self.recorder.norm)
        return None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        returned = _mapped(self.recorder.returned, self.precision.cast)
        for layer in self.skeleton.layers:
            layer.forward = lambda *args, **kwargs: returned
        try:
            with super().attached():
                yield
        finally:
            for layer in self.skeleton.layers:
                del layer.forward
            for buffers in self.open.values():
                buffers.__exit__(None, None, None)


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments."""
    found: torch.Tensor = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
    return found


def _numbers(value: torch.Tensor) -> np.ndarray:
    """[1, T, D] or [T, D] -> [T, D] float32."""
    return value.detach().cpu().float().reshape(-1, value.shape[-1]).numpy().copy()


def _difference(
    exact: torch.Tensor, states: torch.Tensor, same: torch.Tensor | None = None
) -> tuple[float, float] | None:
    """Max and mean of |exact - states|, over the tokens that are the same; None when there are none."""
    import torch

    error = (exact.detach().cpu().to(torch.float64) - states.detach().to(torch.float64)).abs()
    error = error.reshape(-1, error.shape[-1])
    if same is not None:
        error = error[same]
    if not bool(error.isfinite().all()):
        raise DiffusionError(
            "Once more in float64, the reference has numbers that are not finite: leave the yardstick out with "
            "--yardstick none."
        )
    return (float(error.max()), float(error.mean())) if error.numel() else None


class Reference:
    """
    A reference that is run with the memory of one of its parts at a time.

    Args:
        found: what :func:`find` has found.
        checkpoint: whose weights.
        spec: whose attention.
        dtype: what is computed in: float32, or the types the weights are stored in.
        yardstick: what each part is computed in once more, to see what rounding alone changes: float64, float32 on
            the device of an Apple chip (mps), or nothing.

    Attributes:
        unused: names of stored tensors that no parameter takes.
        peak_bytes: most bytes of weights that were there at once so far.

    Raises:
        DiffusionError: no model, no such device, a model that cannot be built.
        CheckpointError: quantized weights, a weight that is missing or has another shape.
    """

    def __init__(
        self,
        found: Found,
        checkpoint: Checkpoint,
        spec: DiffusionSpec,
        *,
        dtype: Dtype = "float32",
        yardstick: Yardstick = "float64",
    ):
        import torch

        if found.model_class is None:
            raise DiffusionError(
                f"{found.name} is no model, so that there are no layers to compare: give a file with the model's class."
            )
        if yardstick == "mps" and not torch.backends.mps.is_available():
            raise DiffusionError(
                "This machine has no mps device to compare the CPU with: leave the yardstick at float64."
            )
        self.found, self.checkpoint, self.spec = found, checkpoint, spec
        self._dtype = torch.float32 if dtype == "float32" else None
        precisions = {"float64": _Precision(), "mps": _Precision("mps", wide=False), "none": None}
        self._precision = precisions[yardstick]
        # Absolute: code of the reference may leave the directory.
        self._files = Files(Checkpoint(checkpoint.path.absolute(), checkpoint.config))
        self._loader = _Loader(self._files)
        self._ways = list(self._possible())
        self._skeleton, self._way = self._first_built()
        self._settled = False
        used = {name for slots in self._skeleton.slots.values() for slot in slots for name in slot.source.names}
        self.unused = sorted(name for name in self._files.entries if name not in used and not is_computed(name))

    @property
    def peak_bytes(self) -> int:
        return self._loader.peak

    def trace(self, ids: Sequence[int], on_stage: Callable[[str], None] = lambda stage: None) -> Trace:
        """
        What the reference makes of one canvas.

        Args:
            ids: token ids [T], masks included.
            on_stage: told the name of each part that is done: ``embedding``, ``layer 0``, .., ``norm``, ``head``.

        Raises:
            DiffusionError: a reference that cannot be run, or does not attend as the checkpoint does.
        """
        if not self._settled:
            self._settle(ids)
        top_k = self.checkpoint.config.get("num_experts_per_tok")
        out = sys.stdout

        def tell(stage: str) -> None:
            with contextlib.redirect_stdout(out):  # code of the reference has none
                on_stage(stage)

        recorder = _Recorder(self._skeleton, self._loader, self._dtype, self._precision, top_k, len(ids), tell)
        with self._failing(len(ids)):
            logits = _checked("head", self._forward(self._way, ids, recorder), len(ids))
        if len(recorder.layers) != len(self._skeleton.layers) or recorder.norm is None:
            raise DiffusionError(
                f"{self.found.name} did not run its {len(self._skeleton.layers)} layers and a final norm one after "
                "the other, so that they cannot be compared: give another modeling file with --reference FILE."
            )
        roundings: tuple[Any, ...] = (None, None, None)
        if self._precision is not None:
            outside = _Outside(self._skeleton, self._loader, recorder, self._precision)
            with self._failing(len(ids)), self._precision.active(self._loader):
                exact = self._forward(self._way, ids, outside)
                roundings = (
                    _difference(outside.embedding, recorder.embedding),
                    _difference(outside.norm, recorder.norm),
                    _difference(exact, logits),
                )
        on_stage("head")
        return Trace(
            reference=self.found.name,
            embedding=Stage(_numbers(recorder.embedding), roundings[0]),
            layers=tuple(recorder.layers),
            norm=Stage(_numbers(recorder.norm), roundings[1]),
            head=Stage(_numbers(logits), roundings[2]),
        )

    # Ways to make a class attend as the checkpoint does: (attention implementation, mask). The mask is put in place of
    # what the module makes ("made"), given to forward ("given"), or left out ("none").

    def _possible(self) -> Iterator[tuple[str | None, str]]:
        from transformers import PreTrainedModel

        if not self.found.own:
            yield "eager", "made"
            return
        assert self.found.model_class is not None
        masks = ("given", "none") if block_of(self.spec) else ("none", "given")
        kinds = ("sdpa", "eager") if issubclass(self.found.model_class, PreTrainedModel) else (None,)
        for kind in kinds:
            for mask in masks:
                yield kind, mask

    def _first_built(self) -> tuple[_Skeleton, tuple[str | None, str]]:
        failed: Exception | None = None
        for way in self._ways:
            try:
                return self._build(way[0]), way
            except DiffusionError:
                raise
            except Exception as error:
                failed = failed or error
        assert failed is not None
        raise DiffusionError(
            f"{self.found.name} cannot be built ({said(failed)}): give a modeling file that this version of "
            "transformers can use, with --reference FILE."
        ) from failed

    def _settle(self, ids: Sequence[int]) -> None:
        """Find the way in which the reference attends as the checkpoint does: one that stays causal would be a wrong
        yardstick."""
        why = ""
        for way in self._ways:
            try:
                skeleton = self._skeleton if way[0] == self._way[0] else self._build(way[0])
                if self._attends(skeleton, way, ids):
                    self._skeleton, self._way, self._settled = skeleton, way, True
                    return
            except DiffusionError:
                raise
            except Exception as error:
                why = why or f" ({said(error)})"
        block = block_of(self.spec)
        wanted = f"from block to block, each of {block} tokens" if block else "to both sides"
        raise DiffusionError(
            f"{self.found.name} does not attend as the checkpoint does, {wanted}, whatever mask it is given{why}: give "
            "another modeling file with --reference FILE."
        )

    def _attends(self, skeleton: _Skeleton, way: tuple[str | None, str], ids: Sequence[int]) -> bool:
        """Whether tokens reach each other through the first layer as they must."""
        import torch

        block, context = block_of(self.spec), self.spec.context_length
        length = min(2 * block if block else _REACH, context or 2 * (block or _REACH))
        canvas = [int(ids[i % len(ids)]) for i in range(length)]

        def states(changed: int | None) -> Any:
            probe = _Probe(skeleton, self._loader, torch.float32)
            other = list(canvas)
            if changed is not None:
                other[changed] = (other[changed] + 1) % self.spec.vocab_size
            with contextlib.suppress(_Stop):
                self._forward(way, other, probe)
            return probe.states.float()

        plain = states(None)
        least = _REACHED * float(plain.std())
        by_last, by_first = ((states(i) - plain).abs().amax(-1) > least for i in (length - 1, 0))
        start = (length - 1) // block * block if block else 0  # of the last token's block
        sees_ahead = start == length - 1 or bool(by_last[start:-1].any())
        return sees_ahead and not bool(by_last[:start].any()) and bool(by_first[min(block or 1, length - 1) :].any())

    def _build(self, attention: str | None) -> _Skeleton:
        import torch
        from transformers import PreTrainedModel

        model = self._made(attention, torch.float32)
        settings = self.checkpoint.config
        count = next((settings[key] for key in ("num_hidden_layers", "n_layers", "n_layer") if settings.get(key)), None)
        layers = _layers(model, count)
        if layers is None:
            raise DiffusionError(
                f"{self.found.name} has no torch.nn.ModuleList of the checkpoint's {count} layers, so that they "
                "cannot be compared: give another modeling file with --reference FILE."
            )
        inside = {module for layer in layers for module in layer.modules()}
        outer = [m for m in model.modules() if m not in inside and (_any(m._parameters) or _any(m._buffers))]
        free = [m for m in model.modules() if m not in inside and next(m.parameters(), None) is None]
        skeleton = _Skeleton(model, layers, outer, free)
        names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        shared: dict[int, list[str]] = {}
        for name, value in model.named_parameters(remove_duplicate=False):
            shared.setdefault(id(value), []).append(name)
        if settings.get("tie_word_embeddings") and isinstance(model, PreTrainedModel):
            with contextlib.suppress(NotImplementedError, AttributeError):  # classes without one of them
                shared[id(model.get_output_embeddings().weight)].append(names[model.get_input_embeddings()] + "weight")
        for part in (*layers, *outer):
            modules = part.modules() if part in inside else (part,)
            skeleton.slots[part] = [slot for module in modules for slot in self._slots(module, names[module], shared)]
        if self._precision is not None and self._precision.wide:
            self._add_exact(skeleton, attention)
        return skeleton

    def _made(self, attention: str | None, dtype: torch.dtype) -> Any:
        """The model of torch, without weights."""
        import copy

        from transformers import PreTrainedModel

        model_class: Any = self.found.model_class
        config = copy.deepcopy(self.found.config)
        older = _for_older_code(model_class if self.found.own else None)
        with silenced(self.found.name), _without_weights(), quiet(), older:
            if issubclass(model_class, PreTrainedModel):
                config._experts_implementation = "eager"
                model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
            else:
                model = model_class(config)
            return model.eval()

    def _add_exact(self, skeleton: _Skeleton, attention: str | None) -> None:
        """Buffers of a model that is made in float64, such as a rope's frequencies: not those that are stored, nor
        those that are others each time, such as random ones."""
        import torch

        assert self._precision is not None
        try:
            with self._precision.active(self._loader):
                model = self._made(attention, torch.float64)
        except Exception:  # a class that cannot be made so: its buffers are cast
            return
        stored = {(slot.owner, slot.name) for slots in skeleton.slots.values() for slot in slots}
        wide = dict(model.named_modules())
        for path, module in skeleton.model.named_modules():
            for name, value in module._buffers.items():
                exact = wide[path]._buffers.get(name) if path in wide else None
                if value is None or exact is None or (module, name) in stored or not value.is_floating_point():
                    continue
                if exact.shape == value.shape and torch.allclose(exact.double(), value.double(), rtol=_SAME, atol=0):
                    skeleton.exact[module, name] = exact.double()

    def _slots(self, module: Any, prefix: str, shared: dict[int, list[str]]) -> Iterator[_Slot]:
        for name, value in module._parameters.items():
            if value is None:
                continue
            full = prefix + name
            candidates = [full, *(other for other in shared[id(value)] if other != full)]
            source = next(filter(None, map(self._files.source, candidates)), None)
            if source is None:
                raise CheckpointError(
                    f"{self.checkpoint.path} has no weight for {full} of {self.found.name}: give the reference of this "
                    "checkpoint, or copy its weights again."
                )
            if source.shape != tuple(value.shape):
                raise CheckpointError(
                    f"{self.checkpoint.path}: {source.names[0]} has the shape {list(source.shape)}, and {full} of "
                    f"{self.found.name} has {list(value.shape)}: give the reference of this checkpoint."
                )
            yield _Slot(module, name, full, source, value)
        for name, value in module._buffers.items():
            if value is None or name in module._non_persistent_buffers_set:
                continue
            source = self._files.source(prefix + name)
            if source is not None and source.shape == tuple(value.shape):
                yield _Slot(module, name, prefix + name, source, value)

    def _forward(self, way: tuple[str | None, str], ids: Sequence[int], visitor: _Visitor) -> Any:
        """The logits [1, T, V] of a canvas."""
        import torch

        model, device = visitor.skeleton.model, visitor.device
        mask = _mask(len(ids), block_of(self.spec), visitor.dtype or _stored(visitor.skeleton), device)
        given: dict[str, Any] = {
            "input_ids": torch.tensor([list(ids)], device=device),
            "position_ids": torch.arange(len(ids), device=device)[None],
            "use_cache": False,
        }
        if way[1] == "given":
            given["attention_mask"] = mask
        accepted = inspect.signature(model.forward).parameters
        made = mask if block_of(self.spec) else None
        lent = self._loader.mode(_Lent(visitor))
        with silenced(self.found.name), torch.no_grad(), quiet(), visitor.attached(), self._masked(way, made), lent:
            out = model(**{key: value for key, value in given.items() if key in accepted})
            logits = getattr(out, "logits", None)
        return _first(out) if logits is None else logits

    @contextlib.contextmanager
    def _masked(self, way: tuple[str | None, str], mask: Any) -> Iterator[None]:
        """The mask in place of all that the module of transformers makes."""
        module = self.found.module
        kept = {name: getattr(module, name) for name in (mask_makers(module) if way[1] == "made" else ())}
        for name in kept:
            setattr(module, name, lambda *args, **kwargs: mask)
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(module, name, value)

    @contextlib.contextmanager
    def _failing(self, length: int) -> Iterator[None]:
        try:
            yield
        except DiffusionError:
            raise
        except Exception as error:
            raise DiffusionError(
                f"{self.found.name} cannot be run on {length} tokens ({said(error)}): give a modeling file that this "
                "version of torch and transformers can use, with --reference FILE."
            ) from error


@contextlib.contextmanager
def _for_older_code(model_class: Any) -> Iterator[None]:
    """What modeling files written for transformers 4 expect of it and 5 has no more: names of tied weights as a list,
    without what they are tied to, and a rope that is not scaled."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ropes: Any = ROPE_INIT_FUNCTIONS
    tied = getattr(model_class, "_tied_weights_keys", None)
    has_plain = "default" in ropes
    if isinstance(tied, list):
        model_class._tied_weights_keys = {}  # tied here when weights are looked for
    ropes.setdefault("default", _plain_rope)
    try:
        yield
    finally:
        if isinstance(tied, list):
            model_class._tied_weights_keys = tied
        if not has_plain:
            del ropes["default"]


def _plain_rope(config: Any, device: Any = None, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """The frequencies of a rope that is not scaled, and the factor of its angles."""
    import torch

    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * (getattr(config, "partial_rotary_factor", None) or 1))
    base = getattr(config, "rope_theta", None) or (getattr(config, "rope_parameters", None) or {})["rope_theta"]
    return 1.0 / base ** (torch.arange(0, size, 2, device=device).float() / size), 1.0


def _any(values: Mapping[str, Any]) -> bool:
    return any(value is not None for value in values.values())


def _layers(model: Any, count: int | None) -> list[Any] | None:
    """The list of layers nearest to the model's root, by its length."""
    from torch import nn

    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(min(lists, key=lambda entry: entry[0].count("."))[1]) if lists else None


def _stored(skeleton: _Skeleton) -> torch.dtype:
    """The type of the first weights outside of the layers, which are the embedding's."""
    slots = [slot for module in skeleton.outer for slot in skeleton.slots[module]]
    found: torch.dtype = slots[0].source.load(None).dtype
    return found


def _mask(length: int, block: int | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    """What is added to the scores [1, 1, T, T]: a position sees all up to its block's end; without blocks, all."""
    import torch

    number = torch.arange(length, device=device) // (block or length)
    hidden = number[None] > number[:, None]
    return torch.zeros(1, 1, length, length, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)
