"""A model from its `config.json`, trained or asked for tokens: `phantomgpu model`.

`forward` says what the model takes, and the configuration of what size that is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from phantomgpu import files
from phantomgpu.errors import PhantomError, SetupNeededError

if TYPE_CHECKING:
    import torch

CLIP_NORM = 1.0
STEPS = 3
"""The first creates the state of the optimizer between blocks that it frees later; the third
allocates as all later ones do."""
NEW_TOKENS = 3
"""With a cache that is allocated at once, later tokens take what these took."""
SIDE = 224
"""Of an image whose size the configuration leaves open."""
LATENTS = 4096
"""Of an image of 1024 x 1024, in patches of 16 x 16: what Flux is trained with."""
COLUMNS = ("tokens", "checkpointing", "ranks", "micro_batch", "batch")
_OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {"fused": True}),  # the default of transformers
    "sgd": ("torch.optim", "SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adafactor": ("torch.optim", "Adafactor", {}),
    "adamw8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
}
_LONGEST = "max_position_embeddings"
_PARTS = "text_config vision_config audio_config thinker_config encoder decoder generator"


@final
@dataclass(frozen=True, slots=True)
class Model:
    """What a model is made and trained with. It has no weights: it is built without memory."""

    file: Path
    """A `config.json`, or the folder that holds it."""
    optimizer: str = "adamw"
    """adamw, sgd, adafactor or adamw8bit."""
    weights: str = "fp32"
    """`fp32`: 32-bit weights, computed in bf16. `bf16`: weights, gradients and state are bf16."""

    def __reduce__(self) -> Any:
        return _imported, (self.file, self.optimizer, self.weights)

    def read(self) -> tuple[str, str, dict[str, Any]]:
        """Return the library, the class (or else the type) and the configuration.

        Raises:
            PhantomError: The file is not the configuration of a model.
            SetupNeededError: The library is not installed.
        """
        file = self.file / "config.json" if self.file.is_dir() else self.file
        what = "config.json of a model"
        config = files.read_json(file, what)
        library = "diffusers" if "_class_name" in config else "transformers"
        try:
            named = [config.get("_class_name"), *(config.get("architectures") or ())]
            name = str(next(filter(None, named), None) or config["model_type"])
            longest = {**config, **(config.get("text_config") or {})}.get(_LONGEST, 1) or 1
        except (LookupError, TypeError) as error:
            raise PhantomError(f"{file} is no {what}: {error!r}") from error
        if type(longest) is not int:
            raise PhantomError(f"{file} is no {what}: its {_LONGEST} is no number")
        spec = find_spec(library)
        if spec is None:
            raise SetupNeededError(f"cannot build {name}: pip install {library}")
        kind, auto = config.get("model_type"), Path(str(spec.origin)).parent / "models" / "auto"
        if kind and not any(f'"{kind}"' in files.read(one).decode() for one in auto.glob("*.py")):
            why = f"this transformers has no model_type {kind!r}"
            raise PhantomError(f"cannot build {name}: {why}; correct {file}, or upgrade it")
        return library, name, config

    def checked(self, length: int, *, learns: bool) -> str:
        """Return what it is and how it is trained, in one line.

        Args:
            length: Tokens of the longest sequence.
            learns: Whether it is trained.

        Raises:
            PhantomError: The model has no such sequences.
        """
        _, name, config = self.read()
        text = {**config, **(config.get("text_config") or {})}
        longest = text.get(_LONGEST, length)
        if longest is not None and length > longest:
            raise PhantomError(f"sequences of {length}: max_position_embeddings is {longest}")
        said = [f"{name}, {self.weights} weights"]
        if learns:
            said += ["computed in bf16"] * (self.weights == "fp32")
            said += [self.optimizer, f"gradients clipped at {CLIP_NORM}"]
            said += ["one micro-batch a step, no padding"]
        return ", ".join(said)

    def build(self, *, checkpointing: bool = False) -> Any:
        """Return the model on the meta device."""
        import torch

        with torch.device("meta"):
            model = self._bare(torch.bfloat16 if self.weights == "bf16" else torch.float32)
            if checkpointing:
                _checkpoint(model)
            return model

    def _bare(self, dtype: torch.dtype) -> Any:
        library, name, read = self.read()
        if library == "diffusers":
            return _class_of(library, name).from_config(read).to(dtype)
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.file, trust_remote_code=False)
        if not config.architectures:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        if name.endswith("SequenceClassification") and config.pad_token_id is None:
            config.pad_token_id = 0  # without one, it refuses batches
        return _class_of(library, name)._from_config(config, dtype=dtype)

    def optimizer_of(self, weights: list[Any]) -> Any:
        """Return the optimizer of the weights that are trained."""
        library, name, how = _OPTIMIZERS[self.optimizer]
        trained = [one for one in weights if one.requires_grad]
        return _class_of(library, name)(trained, **how)


def _imported(*fields: Any) -> Model:
    """Return a model in another process, which then has its class: trials fork after it."""
    model = Model(*fields)
    library, name, config = model.read()
    if config.get("architectures") or library == "diffusers":
        _class_of(library, name)
    return model


def _class_of(library: str, name: str) -> Any:
    found = getattr(import_module(library), name, None)
    if found is None:
        raise PhantomError(f"cannot build {name}: this {library} has no such class")
    return found


def _checkpoint(model: Any) -> None:
    """Compute blocks again in backward, in the words of transformers or diffusers."""
    how = {"use_reentrant": False}
    verbs = {"activation_checkpointing_enable": [how], "gradient_checkpointing_enable": [how]}
    verbs["enable_gradient_checkpointing"] = []  # of diffusers
    verb = next(one for one in verbs if hasattr(model, one))
    try:
        getattr(model, verb)(*verbs[verb])
    except ValueError as error:
        raise PhantomError(f"{error}; write --no-checkpointing") from error


def train(size: int, model: Model, length: int | None, ranks: int, checkpointing: object) -> None:
    """Train on micro-batches of one size, on rank 0 of so many; called on the phantom."""
    import torch

    built = model.build(checkpointing=bool(checkpointing)).train()
    computes_bf16 = model.weights == "fp32"
    if ranks > 1:
        _shard(built, ranks, computes_bf16=computes_bf16)
    _fill(built)
    weights = list(built.parameters())
    parts = [torch.nn.Parameter(_local(one.detach()), one.requires_grad) for one in weights]
    optimizer = model.optimizer_of(parts)
    casts = torch.autocast("cuda", torch.bfloat16, enabled=computes_bf16 and ranks == 1)
    inputs = Inputs(built, size, length).all()
    for _ in range(STEPS):
        with casts:
            loss = _loss(_called(built, inputs))
        loss.backward()
        for whole, part in zip(weights, parts, strict=True):
            part.grad, whole.grad = _local(whole.grad), None
        torch.nn.utils.clip_grad_norm_(parts, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()


def _local(tensor: Any) -> Any:
    """Return the shard of this rank: DTensor's dispatch takes longer than all else of a step."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shard(model: Any, ranks: int, *, computes_bf16: bool) -> None:
    """Shard each block of a `ModuleList`, inner ones first, then the rest, with FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (ranks,))
    narrow, wide = (torch.bfloat16, torch.float32) if computes_bf16 else (None, None)
    inner = MixedPrecisionPolicy(narrow, wide)
    outer = MixedPrecisionPolicy(narrow, wide, output_dtype=wide)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    for block in (one for blocks in reversed(lists) for one in blocks):
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)


def generate(size: int, model: Model, length: int | None, new: int, cache: str) -> None:
    """Let the model write tokens after a prompt; called on the phantom."""
    import torch

    built = model.build().eval()
    _fill(built)
    inputs = Inputs(built, size, length, learns=False).all()
    inputs.pop("decoder_input_ids", None)  # it begins with one token of its own
    done = iter(range(NEW_TOKENS))

    def enough(tokens: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        del scores, rest
        is_last = cache == "static" and next(done, None) is None
        return torch.full((len(tokens),), is_last, device=tokens.device)

    how: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": cache}
    how |= {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    built.generate(**inputs, **how, disable_compile=True, stopping_criteria=[enough])


def _fill(model: Any, device: str = "cuda") -> None:
    """Give the weights memory; those that are tied share it again."""
    model.to_empty(device=device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    for buffer in model.buffers():
        buffer.zero_()  # what lies there may be no index


def _called(model: Any, inputs: dict[str, Any]) -> Any:
    """Call the model; what it refuses is an error that names it."""
    try:
        return model(**inputs)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        shapes = ", ".join(f"{name} {getattr(one, 'shape', one)}" for name, one in inputs.items())
        raise _unfed(type(model).__name__, f"{error}; it was given {shapes}") from error


def _unfed(name: str, why: str) -> PhantomError:
    instead = "write a script that calls it, and `phantomgpu run`"
    return PhantomError(f"cannot feed {name} from its configuration: {why}; {instead}")


def _loss(outputs: Any) -> Any:
    """Return the loss of a model; without one, the mean square of its first output."""
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    first = next(one for one in outputs.values() if getattr(one, "requires_grad", False))
    return first.float().square().mean()


@final
class Inputs:
    """The arguments of a model's `forward`, of the sizes that its configuration says."""

    def __init__(self, model: Any, size: int, length: int | None, *, learns: bool = True) -> None:
        self.model, config, self.size = model, model.config, size
        self.parts = [config, *(getattr(config, part, None) for part in _PARTS.split())]
        self.name = type(model).__name__.removeprefix("FSDP")
        self.given, self.learns = length, learns
        self.takes = inspect.signature(model.forward).parameters
        self.like = _local(next(model.parameters())).new_empty(0)  # its device and type

    def all(self) -> dict[str, Any]:
        """Return the arguments.

        Raises:
            PhantomError: One that the class needs is not known.
        """
        is_diffuser = type(self.model).__module__.startswith("diffusers")
        known = _DIFFUSERS if is_diffuser else _TRANSFORMERS
        made = {name: known[name](self) for name in self.takes if name in known}
        found = {name: one for name, one in made.items() if one is not None}
        named = [one for one in self.takes.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        missing = [one.name for one in named if one.default is one.empty and one.name not in found]
        if missing or not found:
            raise _unfed(self.name, f"{', '.join(missing) or 'its input'} is not known")
        return found

    def of(self, *names: str) -> Any:
        """Return the first setting that the configuration, or a part of it, has."""
        values = (getattr(part, name, None) for name in names for part in self.parts)
        return next((value for value in values if value is not None), None)

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence, or what else has a length."""
        length = self.given or self.of("max_position_embeddings", "n_positions")
        if length is None:
            raise PhantomError(f"how long is an input of {self.name}? Write --length 512")
        return int(length)

    @cached_property
    def side(self) -> tuple[int, int]:
        """Height and width of an image, or of its latents."""
        given = None if {"input_ids", "encoder_hidden_states"} & set(self.takes) else self.given
        size = self.of("image_size", "sample_size") or given or SIDE
        size = [size["height"], size["width"]] if isinstance(size, dict) else size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return int(height), int(width)

    def patches(self, merged: int = 1) -> tuple[int, int]:
        """Return how many patches an image has in height and width."""
        patch = self.of("patch_size") or 1
        patch = (patch if isinstance(patch, int) else patch[-1]) * merged
        return self.side[0] // patch, self.side[1] // patch

    def whole(self, *shape: int) -> Any:
        """Return whole numbers: classes, or tokens that mean nothing special."""
        settings = [pair for one in self.parts if one is not None for pair in vars(one).items()]
        special = [value for name, value in settings if name.endswith(("token_id", "token_index"))]
        plain = next(number for number in range(99) if number not in special)
        return self.like.new_full(shape, plain if len(shape) > 1 else 0, dtype=int)

    def real(self, *shape: int | None) -> Any:
        """Return real numbers in the type of the weights; None if there is no such size."""
        return None if None in shape else self.like.new_full(shape, 0.5)

    def tokens(self) -> Any:
        """Return tokens; some of them stand for the parts of an image."""
        if self.name.endswith("MultipleChoice"):
            return self.whole(self.size, 4, self.length)
        tokens = self.whole(self.size, self.length)
        if self.name.endswith("SequenceClassification") and self.of("eos_token_id") is not None:
            tokens[:, -1] = self.of("eos_token_id")
        image = self.of("image_token_id", "image_token_index")
        if image is not None and "pixel_values" in self.takes:
            high, wide = self.patches(self.of("spatial_merge_size") or 1)
            count = self.of("image_seq_length", "mm_tokens_per_image") or high * wide
            if count > self.length:
                raise PhantomError(f"an image takes {count} tokens; write a larger --length")
            tokens[:, :count] = image
        return tokens

    def pixels(self) -> Any:
        """Return images, or the patches of them all, or videos."""
        channels, (high, wide) = self.of("num_channels", "in_channels") or 3, self.patches()
        if "image_grid_thw" in self.takes:
            area = self.of("patch_size") ** 2 * self.of("temporal_patch_size")
            return self.real(self.size * high * wide, channels * area)
        if "img_ids" in self.takes:  # latents, each with a place of its own
            return self.real(self.size, LATENTS, channels)
        frames = None if "input_ids" in self.takes else self.of("num_frames")
        return self.real(self.size, *([frames] if frames else []), channels, *self.side)

    def sound(self) -> Any:
        """Return samples, or a spectrogram: bins by frames (Whisper), or frames by bins."""
        bins, positions = self.of("num_mel_bins"), self.of("max_source_positions")
        if bins and positions:
            return self.real(self.size, bins, 2 * positions)
        width = self.of("feature_projection_input_dim", "input_feat_per_channel") or bins
        frames = self.of("max_length") if self.of("frequency_stride") else self.length
        return self.real(self.size, frames, *([width] if width else []))

    def labels(self) -> Any:
        """Return labels as the kind of model, the end of its name, wants them; None: no loss."""
        texts = {"input_ids", "decoder_input_ids"} & set(self.takes)
        kinds: dict[str, Callable[[], Any]] = {
            "(Sequence|Image|Audio|Video)Classification|Choice": lambda: self.whole(self.size),
            "CTC": lambda: self.whole(self.size, max(1, self.length // 640)),  # 320 make a frame
            "SemanticSegmentation": lambda: self.whole(self.size, *self.side),
            "": lambda: self.targets() if texts else None,
        }
        if not self.learns or "labels" not in self.takes:
            return None
        if self.name.endswith("ObjectDetection"):
            raise _unfed(self.name, "the number of boxes of an image is not known")
        return next(make for end, make in kinds.items() if re.search(f"({end})$", self.name))()

    def targets(self) -> Any:
        """Return the tokens that are to be written."""
        most = self.of("max_target_positions")
        return self.tokens() if most is None else self.whole(self.size, min(most, self.length))

    def classes(self) -> Any:
        """Return a class for each image, if the model knows any."""
        return self.whole(self.size) if self.of("num_class_embeds", "num_embeds_ada_norm") else None


_CLASSES: Callable[[Inputs], Any] = lambda one: one.whole(one.size)  # noqa: E731
_TEXT = "caption_channels", "cross_attention_dim", "joint_attention_dim"
_TRANSFORMERS: dict[str, Callable[[Inputs], Any]] = {
    "input_ids": Inputs.tokens,
    "pixel_values": Inputs.pixels,
    "image_grid_thw": lambda one: one.whole(1).new([[1, *one.patches()]] * one.size),
    "input_features": Inputs.sound,
    "input_values": Inputs.sound,
    "mm_token_type_ids": lambda one: (one.tokens() == one.of("image_token_id")).long(),
    "labels": Inputs.labels,
    **dict.fromkeys(("next_sentence_label", "start_positions", "end_positions"), _CLASSES),
    "decoder_input_ids": lambda one: None if one.labels() is not None else one.targets(),
    "return_loss": lambda one: one.learns,
    "use_cache": lambda one: False if one.learns else None,
}
_DIFFUSERS: dict[str, Callable[[Inputs], Any]] = {
    "sample": Inputs.pixels,
    "hidden_states": Inputs.pixels,
    "timestep": _CLASSES,
    "encoder_hidden_states": lambda one: one.real(one.size, one.given or 77, one.of(*_TEXT)),
    "pooled_projections": lambda one: one.real(one.size, one.of("pooled_projection_dim")),
    "guidance": lambda one: one.real(one.size) if one.of("guidance_embeds") else None,
    "img_ids": lambda one: one.real(LATENTS, 3),
    "txt_ids": lambda one: one.real(one.given or 77, 3),
    "class_labels": Inputs.classes,
    "added_cond_kwargs": lambda one: (
        {"resolution": None, "aspect_ratio": None} if one.of("caption_channels") else None  # PixArt
    ),
}
"""What a `forward` may take; None is left out."""
