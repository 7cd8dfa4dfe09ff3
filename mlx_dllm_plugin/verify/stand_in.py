"""A stand-in for a reference's model: its forward returns the logits of the model here, for whatever a sampler asks of
it, and refuses what that model would not compute."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import mlx.core as mx
import numpy as np

from ..caches import BlockWindow
from ..decode import family_on
from ..errors import DiffusionError, printable
from ..layerwise import block_of, caches
from ..plan import Plan
from ..spec import DiffusionSpec

if TYPE_CHECKING:
    import torch

FORWARDS_PER_TOKEN = 50  # after so many a sampler does not end: LLaDA2.2's, the most patient, stops after 32

_IDS = ("input_ids", "x", "idx", "tokens", "inputs")
_MASKS = ("attention_mask", "attention_bias")
_POSITIONS = ("position_ids", "cache_position", "tok_idx")
_PASTS = ("past_key_values", "past_key_value")
_STORES = ("store_kv", "update_past_key_values")
_BLOCKS = ("block_length", "block_size")
_FREE = ("use_cache", "return_dict", *_STORES)


class Reference(Protocol):
    """What is needed of a reference: its name, the class of its model and its configuration, or its module."""

    @property
    def name(self) -> str: ...
    @property
    def model_class(self) -> type | None: ...
    @property
    def config(self) -> Any: ...
    @property
    def module(self) -> ModuleType | None: ...


def stand_in(found: Reference, answers: Answers) -> Any:
    """An instance of the reference's class, or of none, that has no weights and whose forward is ours."""
    import torch

    base: Any = found.model_class if _is_module(found.model_class) else torch.nn.Module

    class StandIn(base):
        device = property(lambda self: torch.device("cpu"))
        dtype = property(lambda self: torch.float32)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return answers(args, kwargs)

        __call__ = forward

    StandIn.__name__, StandIn.__qualname__, StandIn.__module__ = base.__name__, base.__qualname__, base.__module__
    made = StandIn.__new__(StandIn)
    torch.nn.Module.__init__(made)
    made.config = found.config
    made.generation_config = _generation_config(found)
    return made.eval()


def _is_module(cls: Any) -> bool:
    import torch

    return isinstance(cls, type) and issubclass(cls, torch.nn.Module)


def _generation_config(found: Reference) -> Any:
    """That of the reference, or what transformers makes of its configuration."""
    own = getattr(found, "generation_config", None)
    if own is not None or not hasattr(found.config, "to_dict"):
        return own
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_model_config(found.config)
    except Exception:  # it is of another version; most samplers never ask
        return None


class Output:
    """What a forward returns: ``logits`` [B, T, V] float32, which are computed when they are asked for, and
    ``past_key_values``."""

    def __init__(self, compute: Callable[[], torch.Tensor], past: Any):
        self._compute = compute
        self.past_key_values = past

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._compute()

    def __getitem__(self, key: Any) -> Any:
        if key in (0, "logits"):
            return self.logits
        return {1: self.past_key_values, "past_key_values": self.past_key_values}[key]

    def __iter__(self) -> Iterator[Any]:
        yield self.logits
        yield self.past_key_values


class Past:
    """A cache of keys that are token ids."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        self._keys = keys if self._keys is None else torch.cat([self._keys, keys], dim=2)
        return self._keys, self._keys

    def get_seq_length(self, layer: int = 0) -> int:
        return 0 if self._keys is None else self._keys.shape[2]

    def crop(self, length: int) -> None:
        if self._keys is not None:
            self._keys = self._keys[:, :, :length]

    def __bool__(self) -> bool:
        return True

    def _refuse(self, *_: Any) -> NoReturn:
        raise DiffusionError(
            f"{self._name} reads the keys and values in past_key_values, and the stand-in has none: give a sampler "
            "that only passes them on, such as the one without its own cache."
        )

    __getitem__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]


class Answers:
    """
    The forward of the stand-in: logits of our model, for whatever a reference's sampler asks of its own.

    A cache is the caller's or ours; its keys are the ids of the tokens that are stored, so that a caller may cut or
    copy it. What it holds is what the columns of a call see before themselves.

    ``canvases`` are the ids [B, T] of all calls, with what the cache held.
    """

    def __init__(self, found: Reference, name: str, model: Any, spec: DiffusionSpec, planned: Plan):
        if planned.block_length is not None:
            spec = replace(spec, defaults={**spec.defaults, "block_length": planned.block_length})
        self.name, self.model, self.spec = name, model, spec
        self.block, self.origin = block_of(spec), planned.origin
        self.most = FORWARDS_PER_TOKEN * (planned.cap + (self.block or 0))
        self.forwards = 0
        self.canvases: list[np.ndarray] = []
        self.notes: list[str] = []
        self.refusal: DiffusionError | None = None
        own: Any = found.model_class
        self._signature = inspect.signature(own.forward) if _is_module(own) else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Output:
        try:
            return self._answer(*self._named(args, kwargs))
        except DiffusionError as error:
            self.refusal = error
            raise

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments by name: those that were given, and the defaults of the class's own forward."""
        if self._signature is None:
            names = (_IDS[0], _MASKS[0], _POSITIONS[0], _PASTS[0])
            if len(args) > len(names):
                self._refuse(f"with {len(args)} arguments without a name", "by name")
            return {**dict(zip(names, args, strict=False)), **kwargs}, {}
        bound = self._signature.bind(None, *args, **kwargs)

        def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
            named: dict[str, Any] = {}
            for name, value in list(arguments.items())[1:]:
                kind = self._signature.parameters[name].kind  # type: ignore[union-attr]
                named |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
            return named

        given = flat(bound.arguments)
        bound.apply_defaults()
        return given, flat(bound.arguments)

    def _answer(self, given: dict[str, Any], defaults: dict[str, Any]) -> Output:
        self.forwards += 1
        if self.forwards > self.most:
            raise DiffusionError(
                f"{self.name} called its model more than {self.most} times and does not end: it may wait for "
                "what never comes; see its settings."
            )
        for name, value in given.items():
            self._check_known(name, value)
        ids = self._ids(given)
        past = _first(given, _PASTS)
        use_cache = bool(given.get("use_cache", defaults.get("use_cache")))
        if past is None and use_cache:
            past = Past(self.name)
        stored = self._stored(past, ids)
        whole = np.concatenate([stored, ids], axis=1)
        start = stored.shape[1]
        self._check_positions(given, start, ids.shape[1])
        for name in _MASKS:
            if given.get(name) is not None:
                self._check_mask(name, given[name], start, whole.shape)
        if self.spec.context_length is not None and whole.shape[1] > self.spec.context_length:
            self._refuse(
                f"on {whole.shape[1]} tokens, and the model's context is {self.spec.context_length}", "on fewer"
            )
        self.canvases.append(whole)
        flags = [given.get(name, defaults.get(name)) for name in _STORES if name in given or name in defaults]
        if past is not None and all(flags):
            self._store(past, ids)
        return Output(lambda: self.logits(whole, start), past)

    def logits(self, whole: np.ndarray, start: int) -> torch.Tensor:
        """Logits [B, T, V] of the columns from ``start``."""
        import torch

        layers = caches(self.model, whole.shape[1], self.block)
        if self.block is not None and self.origin:
            window = BlockWindow([0], [whole.shape[1]], whole.shape[1], self.block, [self.origin])
            for layer in layers:
                layer.window = window
        family = family_on(self.model)
        states = family.hidden(self.model, mx.array(whole.astype(np.int32)), layers)
        return torch.from_numpy(np.array(family.head(self.model, states[:, start:]).astype(mx.float32)))

    def _refuse(self, what: str, way: str) -> NoReturn:
        raise DiffusionError(
            f"{self.name} calls its model {what}, which the stand-in cannot answer: give a sampler that calls it {way}."
        )

    def _check_known(self, name: str, value: Any) -> None:
        if name in (*_IDS, *_MASKS, *_POSITIONS, *_PASTS, *_FREE):
            return
        if value is None or (isinstance(value, (bool, int, float)) and not value):
            return
        if name in _BLOCKS and self.block is not None and isinstance(value, int):
            if value != self.block:
                raise DiffusionError(
                    f"{self.name} calls its model with {name} {value}, and its attention here has blocks of "
                    f"{self.block}: give the block length with --set."
                )
            return
        self._refuse(f"with {name}, {shown(value)}", "with token ids, a mask, positions and a cache alone")

    def _ids(self, given: dict[str, Any]) -> np.ndarray:
        import torch

        ids = _first(given, _IDS)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise DiffusionError(
                f"{self.name} calls its model on {shown(ids)}, where token ids of shape [batch, length] are expected."
            )
        array = ids.detach().cpu().numpy()
        outside = array[(array < 0) | (array >= self.spec.vocab_size)]
        if outside.size:
            raise DiffusionError(
                f"{self.name} calls its model on token id {outside[0]}, outside the vocabulary of "
                f"{self.spec.vocab_size}."
            )
        return array.astype(np.int64)

    def _stored(self, past: Any, ids: np.ndarray) -> np.ndarray:
        """The tokens [B, n] that a cache holds."""
        nothing = ids[:, :0]
        if past is None:
            return nothing
        try:
            length = int(past.get_seq_length())
            stored = self._update(past, nothing) if length else nothing
        except Exception as error:
            raise self._bad_cache(past, error) from error
        if stored.shape != (len(ids), length):
            raise self._bad_cache(past, f"it holds {length} tokens and gives back {list(stored.shape)}")
        return stored

    def _store(self, past: Any, ids: np.ndarray) -> None:
        try:
            self._update(past, ids)
        except Exception as error:
            raise self._bad_cache(past, error) from error

    @staticmethod
    def _update(past: Any, ids: np.ndarray) -> np.ndarray:
        import torch

        keys = torch.from_numpy(ids.copy())[:, None, :, None]
        return past.update(keys, keys, 0)[0][:, 0, :, 0].to(torch.int64).numpy()

    def _bad_cache(self, past: Any, why: Any) -> DiffusionError:
        if isinstance(why, DiffusionError):
            return why
        why = last_line(why) if isinstance(why, BaseException) else why
        return DiffusionError(
            f"{self.name} gives its model past_key_values ({shown(past)}) that the stand-in cannot keep "
            f"tokens in ({why}): give a sampler with transformers' DynamicCache, or without a cache."
        )

    def _check_positions(self, given: dict[str, Any], start: int, width: int) -> None:
        """The columns stand behind what is stored, one after the other."""
        for name in _POSITIONS:
            if given.get(name) is None:
                continue
            positions = np.asarray(given[name])
            first = int(positions.flat[0]) if positions.size else 0
            if positions.size % width or (positions.reshape(-1, width) != first + np.arange(width)).any():
                self._refuse(f"with {name} that do not count up", "on tokens that stand one after the other")
            if first != start:
                self._refuse(
                    f"on tokens from position {first} on, with {start} tokens in past_key_values",
                    "on all that is not stored",
                )

    def _check_mask(self, name: str, mask: Any, start: int, shape: tuple[int, ...]) -> None:
        """A mask must ask for what the model's attention is anyway."""
        rows, width = shape
        visible = self._visible(start, width)
        if isinstance(mask, str) and mask == "full":  # Dream's word
            seen = np.ones_like(visible)
        else:
            values = _numbers(mask)
            if values is None:
                self._refuse(f"with {name}, {shown(mask)}", "with a tensor")
            elif values.ndim == 2 and values.shape[0] == rows and values.shape[1] in (width, width - start):
                if not values.all():
                    self._refuse(f"with {name} that hides columns of the canvas (padding)", "without padding")
                return
            elif values.shape[-2:] != visible.shape:
                self._refuse(
                    f"with {name} of shape {list(values.shape)} for {list(visible.shape)} columns",
                    "with a mask of what it computes",
                )
            seen = self._seen(name, values)
        wrong = np.argwhere(seen.reshape(-1, *visible.shape) != visible)
        if len(wrong):
            query, key = (int(i) for i in wrong[0][1:])
            blocks = f", blocks of {self.block}" if self.block is not None else ""
            raise DiffusionError(
                f"{self.name} calls its model with {name} in which position {start + query} "
                f"{'does not see' if visible[query, key] else 'sees'} position {key}, and the checkpoint's attention "
                f"({self.spec.attention}{blocks}) is another: give the block length with --set, or the sampler that "
                "belongs to the checkpoint."
            )

    def _seen(self, name: str, values: Any) -> np.ndarray:
        """A mask as booleans: true is seen."""
        if values.dtype == bool:
            return values
        if np.isin(values, (0, 1)).all() and values.any():
            text = (
                f"{self.name} gives its model {name} of the numbers 0 and 1, which some code adds to the scores, "
                "so that nothing is hidden; it is read as what may be seen."
            )
            if not values.all() and text not in self.notes:
                self.notes.append(text)
            return values == 1
        hidden = values <= -1e4
        if not (hidden | (values == 0)).all():
            self._refuse(f"with {name} of other numbers than 0 and a large negative one", "with a mask of these")
        return ~hidden

    def _visible(self, start: int, width: int) -> np.ndarray:
        """What each column from ``start`` sees [T, K] of ``width`` columns."""
        if self.block is None:
            return np.ones((width - start, width), dtype=bool)
        block = (np.arange(width) - self.origin) // self.block
        return block[None] <= block[start:, None]


def _first(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)


def _numbers(mask: Any) -> np.ndarray | None:
    """A mask's tensor as booleans, of integers too, or float64; None for anything else."""
    import torch

    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 3, 4):
        return None
    mask = mask.detach().cpu()
    return mask.to(torch.float64).numpy() if mask.is_floating_point() else (mask != 0).numpy()


def last_line(error: BaseException) -> str:
    """What Python says of an exception, in one line."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return printable(text if len(text) <= 300 else text[:297] + "...")


def shown(value: Any) -> str:
    """A value in a few words."""
    shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
    text = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}{shape}"
    return printable(text if len(text) <= 80 else text[:77] + "...")
