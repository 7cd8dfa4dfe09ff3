"""Models that this plugin decodes in mlx-vlm's place: the face mlx-vlm expects of them, and our model over the arrays
of a model that mlx-vlm has loaded."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...errors import DiffusionError, note

FAMILY = "llada2_moe"
_ATTRIBUTE = "mlx_dllm_checkpoint"  # of mlx-vlm's own models


class Config:
    """A checkpoint's config.json and generation_config.json as attributes, with every key: mlx-vlm's own ModelConfig
    drops those it has no field for, such as ``expert_capacity``."""

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class Model(nn.Module):
    """
    A model of ours as mlx-vlm knows models: a ``config``, and the weights under ``language_model``.

    Args:
        language_model: the loaded model, with its ``diffusion_spec`` and ``diffusion_family``.
        config: what mlx-vlm's ``load_config`` reads.
    """

    def __init__(self, language_model: Any, config: Mapping[str, Any], model_path: Path):
        super().__init__()
        spec = language_model.diffusion_spec
        self.language_model = language_model
        eos = list(spec.eos_token_ids)
        own = {
            "model_type": spec.family,
            "vocab_size": spec.vocab_size,
            "mask_token_id": spec.mask_token_id,
            "eos_token_id": eos,
            "pad_token_id": eos[0] if eos else None,
        }
        given = {name: value for name, value in config.items() if value is not None}
        self.config = Config({**config, **own, **{name: given[name] for name in own if name in given}})
        self.model_type = self.config.model_type  # type: ignore[attr-defined]
        self.model_path = model_path

    @property
    def diffusion_spec(self) -> Any:
        return self.language_model.diffusion_spec

    @property
    def diffusion_family(self) -> Any:
        return self.language_model.diffusion_family

    @property
    def layers(self) -> list[Any]:
        return self.language_model.layers

    # What the engine asks of a model.

    @property
    def model(self) -> Any:
        return self.language_model.model

    @property
    def args(self) -> Any:
        return self.language_model.args

    def head(self, states: mx.array) -> mx.array:
        return self.language_model.head(states)

    def get_input_embeddings(self, input_ids: mx.array | None = None, pixel_values: Any = None, **kwargs: Any) -> Any:
        """mlx-vlm's InputEmbeddingsFeatures of text. Raises DiffusionError for images."""
        from mlx_vlm.models.base import InputEmbeddingsFeatures

        _refuse_pixels(self, pixel_values)
        if input_ids is None:
            raise DiffusionError(f"{self.model_type} needs input_ids.")
        return InputEmbeddingsFeatures(inputs_embeds=self.model.word_embeddings(input_ids))

    def __call__(
        self,
        input_ids: mx.array,
        pixel_values: Any = None,
        mask: mx.array | None = None,
        cache: Any = None,
        inputs_embeds: mx.array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Ids [B, T] -> mlx-vlm's output with logits [B, T, V] of the tokens at the same positions. Raises
        DiffusionError for padding and images, and in training."""
        from mlx_vlm.models.base import LanguageModelOutput

        _refuse_pixels(self, pixel_values)
        if self.training:
            raise DiffusionError(
                f"Training of {self.model_type} does not work in this version: the loss of the next token is wrong for "
                "masked diffusion."
            )
        if mask is not None and not mask.all():
            raise DiffusionError(f"{self.model_type} is called with rows of one length: leave out mask.")
        return LanguageModelOutput(logits=self.language_model(input_ids, cache, inputs_embeds))


def _refuse_pixels(model: Model, pixel_values: Any) -> None:
    if pixel_values is not None:
        raise DiffusionError(f"{model.model_type} reads text alone: leave out images, audio and video.")


@dataclass
class Checkpoint:
    """Where a model that mlx-vlm has loaded and decodes itself comes from; and our model over its arrays, once one was
    asked for, with the arrays it was made over."""

    path: Path
    family: Any
    spec: Any
    model: Any = None
    arrays: tuple[Any, ...] = ()


def remember(model: Any, path: Path, family: Any, spec: Any) -> None:
    """Keep on a model that mlx-vlm has loaded what ours needs."""
    setattr(model, _ATTRIBUTE, Checkpoint(path, family, spec))


def is_ours(model: Any) -> bool:
    """Whether a model decodes with this plugin alone."""
    return getattr(model, "diffusion_spec", None) is not None


def can_be_ours(model: Any) -> bool:
    """Whether a model that mlx-vlm decodes can be decoded by this plugin too."""
    return getattr(model, _ATTRIBUTE, None) is not None


def spec_of(model: Any) -> Any:
    """The spec of a model of either kind, or None."""
    known = getattr(model, _ATTRIBUTE, None)
    return getattr(model, "diffusion_spec", None) if known is None else known.spec


def decoder_of(model: Any) -> Any:
    """The model that the engine decodes. Raises DiffusionError."""
    known = getattr(model, _ATTRIBUTE, None)
    if known is None:
        return getattr(model, "language_model", model)
    arrays = _arrays(model.language_model)
    if (
        known.model is None
        or len(arrays) != len(known.arrays)
        or any(a is not b for a, b in zip(arrays, known.arrays, strict=True))
    ):
        known.model, known.arrays = _over(model.language_model, known), arrays
    return known.model


def _arrays(model: Any) -> tuple[Any, ...]:
    return tuple(leaf[1] for leaf in tree_flatten(model.parameters()))


def hint(model: Any) -> None:
    """Say once what the family had to assume of a model that mlx-vlm has loaded."""
    from ...checkpoint import open_checkpoint

    known = getattr(model, _ATTRIBUTE, None)
    assumed = known and known.family.hint(open_checkpoint(known.path))
    if assumed:
        say(assumed)


def _over(theirs: Any, known: Checkpoint) -> Any:
    """Our model of a checkpoint over the arrays of mlx-vlm's: linear layers, quantized or not, are copies of its
    modules that hold the same arrays. Raises DiffusionError."""
    from ...checkpoint import open_checkpoint

    config = dict(open_checkpoint(known.path).config)
    known.family.prepare_config(config)
    module = importlib.import_module(known.family.architecture(config))
    model = module.Model(module.ModelArgs.from_dict(config))
    there = dict(theirs.named_modules())
    for name, ours in model.named_modules():
        if ours.children() or not ours.parameters():
            continue
        source = there.get(name)
        if source is None:
            raise DiffusionError(
                f"mlx-vlm's model of {known.path.name} has no {name}, so that this plugin cannot decode with its "
                "weights: leave out the options of this plugin, or use mlx_lm.generate."
            )
        if type(ours).__module__ == module.__name__:
            ours.update({key: source[key] for key in ours.parameters()})
        else:
            _put(model, name, _twin(source))
    known.family.repair(model, config)
    if known.family.float32_on_cpu and mx.default_device() == mx.Device(mx.cpu):
        if any(value.dtype in (mx.bfloat16, mx.float16) for value in _arrays(model)):
            model.set_dtype(mx.float32)  # as the family does where it loads: on the CPU this is a copy
    model.eval()
    model.diffusion_spec, model.diffusion_family = known.spec, known.family
    return model


def _put(model: Any, name: str, module: Any) -> None:
    *path, last = name.split(".")
    owner = model
    for part in path:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    owner[last] = module


def _twin(module: Any) -> Any:
    """Another module with the same arrays: what is assigned to it does not reach the first."""
    twin = copy.copy(module)
    for name, child in module.children().items():
        if isinstance(child, nn.Module):
            twin[name] = _twin(child)
    return twin


# A package beside us

_OTHER = "llada22_mlx"
# The functions through which a request goes; a package that has bound others decodes in our place.
_ROAD = {
    "mlx_vlm": ("load", "generate", "stream_generate"),
    "mlx_vlm.utils": ("load", "load_model"),
    "mlx_vlm.generate.dispatch": ("generate", "stream_generate", "stream_diffusion_generate_from_kwargs"),
    "mlx_vlm.generate.diffusion": ("stream_diffusion_generate_from_kwargs",),
}
_said: set[str] = set()


def _is_theirs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == _OTHER


def other_decodes() -> bool:
    """Whether the package llada22_mlx of a model's folder has bound functions of its own in mlx-vlm's modules, so that
    it loads and decodes LLaDA2.2."""
    if _OTHER not in sys.modules:
        return False
    return any(
        _is_theirs(vars(module).get(name))
        for module, names in ((sys.modules.get(where), names) for where, names in _ROAD.items())
        if module is not None
        for name in names
    )


def say_who_loads(path: Path) -> None:
    """Where llada22_mlx is imported too, say once that its code is not in force."""
    if _OTHER in sys.modules:
        say(
            f"{_OTHER} is imported too: mlx-dllm-plugin loads and decodes {path.name}, not {_OTHER} "
            f"(MLX_DLLM_PLUGIN=0 leaves it to {_OTHER})."
        )


def say_who_decodes(model: Any) -> None:
    """Say once if a model was built by llada22_mlx."""
    if _OTHER in sys.modules and any(_is_theirs(type(m)) for m in (model, getattr(model, "language_model", None))):
        say_other()


def say_other() -> None:
    say(f"{_OTHER} is imported, and has put its own code into mlx-vlm: it decodes LLaDA2.2, not mlx-dllm-plugin.")


def say(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        note(sentence)
