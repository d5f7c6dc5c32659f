"""Sections `model` and `data`: the trained model, the prompts and answers, and the text around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hpc_grpo.config.rollout import Environment, RewardConfig
from hpc_grpo.section import PathText, Section, TopP

_TEMPLATES = ("chat", "plain")


def _template(value: str | None) -> str | None:
    if value in (None, *_TEMPLATES) or "." in str(value) or "/" in str(value):
        return value
    raise ValueError("must be chat, plain, or a Jinja file with a chat template, such as mine.jinja")


Template = Annotated[PathText, AfterValidator(_template)]
Preprocessing = Literal["generic", "deepseek"]
_OF_DATA = "Same as data.{0}, for this source. Default: data.{0}."
_PATH = (
    "A .jsonl, .json, .parquet or .arrow file, a folder of a saved data set, a Hugging Face name, reasoning_gym:TASK, "
    "or your function that yields items: module:function, path/to/file.py:function."
)


class ModelConfig(Section):
    path: PathText = Field(description="Hugging Face model: a folder, or a name in the local cache.")
    adapter: PathText | None = Field(
        None, description="Folder of a LoRA adapter of this model, in PEFT's format, to begin with. Needs lora."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Precision of the learners' forward pass and of exports; engines have their own key."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description=(
            "Precision of the output layer, in learners and engines. model: the precision of model.dtype. "
            "Rounded logits make the logprobs of engines and learners differ."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="cuda, cpu (reserves no GPUs), or auto (cuda if torch sees a GPU, else cpu)."
    )
    train_vision: bool = Field(False, description="Train all parts of an image model. false: only its language model.")


class _SourceKeys(Section):
    """Keys of a source. A data set with one source has these keys directly, as in data.train.split."""

    name: str | None = Field(None, description="Name of the source in metrics and rollouts. Default: from its path.")
    args: dict[str, Any] = Field({}, description="Keyword arguments of a reasoning_gym task, or of your function.")
    split: str = Field("train", description="Split of a Hugging Face data set.")
    subset: str | None = Field(None, description="Configuration name of a Hugging Face data set (GSM8K: main).")
    prompt_field: str | None = Field(
        "question", description="Column with the prompt text. null: no column; the environment makes the prompt."
    )
    answer_field: str | None = Field(
        "answer",
        description="Column with the reference answer. A dot selects a value inside a column. null: no answer.",
    )
    messages_field: str | None = Field(None, description="Column with chat messages; replaces prompt_field when set.")
    max_items: PositiveInt | None = Field(None, description="Use only the first N items. Default: all items.")
    rewards: list[RewardConfig] | None = Field(
        None, description="Rewards of this source's prompts. Default: the rewards of the run."
    )
    environment: Environment | None = Field(
        None, description="Environment of this source's prompts. Default: the environment of the run."
    )
    template: Template | None = Field(None, description=_OF_DATA.format("template"))
    preprocessing: Preprocessing | None = Field(None, description=_OF_DATA.format("preprocessing"))
    prompt_format: str | None = Field(None, description=_OF_DATA.format("prompt_format"))
    system_prompt: str | None = Field(None, description=_OF_DATA.format("system_prompt"))
    template_args: dict[str, Any] | None = Field(None, description=_OF_DATA.format("template_args"))


class SourceConfig(_SourceKeys):
    path: PathText = Field(description=_PATH)
    weight: PositiveFloat | None = Field(
        None, description="Share of the prompts of an epoch, relative to the other sources of the mix."
    )
    count: PositiveInt | None = Field(
        None, description="Prompts in an epoch. Default without weights: each item of the source once."
    )


class DatasetConfig(_SourceKeys):
    """One source (`path`), or several sources (`mix`)."""

    path: PathText | None = Field(None, description=_PATH)
    mix: list[SourceConfig] = Field(
        [], description="Several sources instead of path. Each has the keys of a source, and weight or count."
    )

    @model_validator(mode="after")
    def _one_or_several(self) -> DatasetConfig:
        """Raise ValueError unless there is a path, or a mix without keys that belong to its sources."""
        if not self.mix and not self.path:
            raise ValueError("path must be set, or mix with several sources")
        unset = type(self).model_construct()
        beside = [key for key in _SourceKeys.model_fields if getattr(self, key) != getattr(unset, key)]
        if self.mix and beside:
            raise ValueError(f"with mix, {', '.join(beside)} belongs to each source of the mix. Set it there")
        if self.mix and self.path:
            raise ValueError("path and mix exclude each other. Remove one of them, or set path to null")
        return self

    def sources(self, key: str) -> Iterator[tuple[str, SourceConfig]]:
        """Yield each source with its key in the config, such as data.train or data.train.mix.0."""
        for position, source in enumerate(self.mix):
            yield f"{key}.mix.{position}", source
        if self.path is not None:
            values = {name: getattr(self, name) for name in (*_SourceKeys.model_fields, "path")}
            yield key, SourceConfig.model_construct(**values)


class EvalSetConfig(DatasetConfig):
    """A further eval set. Unset `num_samples`, `temperature` and `top_p` are those of `eval`."""

    num_samples: PositiveInt | None = Field(
        None, description="Like eval.num_samples, for this set. Default: eval.num_samples."
    )
    temperature: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Like eval.temperature, for this set. Default: eval.temperature."
    )
    top_p: TopP | None = Field(None, description="Like eval.top_p, for this set. Default: eval.top_p.")

    @property
    def own_settings(self) -> dict[str, Any]:
        """Return the keys of `eval` that this set overrides."""
        return self.model_dump(exclude=set(DatasetConfig.model_fields), exclude_none=True)


class CurriculumConfig(Section):
    easy_from: float = Field(1.0, description="A group with at least this mean reward is easy.")
    easy_rest: NonNegativeInt | None = Field(None, description="Passes that skip an easy prompt. null: all later ones.")
    hard_to: float | None = Field(
        None, description="A group with at most this mean reward is hard. null: no group is hard."
    )
    hard_rest: NonNegativeInt | None = Field(1, description="Passes that skip a hard prompt. null: all later passes.")
    after: PositiveInt = Field(
        2, description="A prompt counts as easy (or hard) after this many easy (or hard) groups in a row."
    )
    difficulty_field: str | None = Field(
        None,
        description=(
            "Column with the prompt's difficulty, a number. Training starts with easy prompts and adds harder "
            "prompts over time. Default: all prompts from the start."
        ),
    )
    difficulty_epochs: PositiveFloat = Field(
        1.0, description="Epochs until the hardest prompts by difficulty_field take part."
    )


class DataConfig(Section):
    train: DatasetConfig
    eval: DatasetConfig | None = Field(None, description="Held-out data set for eval.")
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="Share of data.train's prompts held out for eval, instead of data.eval. A prompt's hash decides.",
    )
    eval_sets: dict[str, EvalSetConfig] = Field(
        {},
        description=(
            "Further eval sets by name. Each has the keys of data.eval, num_samples, temperature and "
            "top_p. Metrics: eval/NAME/pass@1."
        ),
    )
    template: Template = Field(
        "chat",
        description=(
            "chat: the tokenizer's chat template. plain: only prompt_format. Or a Jinja file with a chat template to "
            "use instead of the tokenizer's."
        ),
    )
    preprocessing: Preprocessing = Field(
        "generic",
        description=(
            "generic: the text unchanged. deepseek: DeepSeek-R1's prompt, which asks for <think> and <answer> "
            "elements: with template plain the base model's conversation, with chat a system prompt."
        ),
    )
    prompt_format: str = Field("{prompt}", description="Text around a plain prompt; {prompt} is replaced.")
    system_prompt: str | None = Field(None, description="System message put before a chat prompt.")
    template_args: dict[str, Any] = Field(
        {}, description="Arguments of the chat template, such as {enable_thinking: false}."
    )
    images: str | None = Field(
        None,
        description=(
            "Column with the image of a prompt, or a list of images. If it is the messages_field column, images are "
            "parts of the messages. Default: no images."
        ),
    )
    max_pixels: PositiveInt | None = Field(
        None, description="Scale down images with more pixels than this. Default: the model's processor decides."
    )
    max_prompt_tokens: PositiveInt = Field(
        512, description="Longest prompt in tokens. A longer prompt is an error; see drop_long_prompts."
    )
    drop_long_prompts: bool = Field(
        False, description="Drop items that are too long instead of an error. The log says how many."
    )
    deduplicate: bool = Field(
        False, description="Drop training prompts that repeat, or that are in an eval set. The log says how many."
    )
    curriculum: CurriculumConfig | None = Field(
        None,
        description=(
            "Skip prompts whose last groups were easy, or hard. {}: retire a prompt after two groups in a row "
            "with a mean reward of 1. Default: skip none."
        ),
    )
    shuffle: bool = Field(True, description="Shuffle each epoch. run.seed and the epoch decide the order.")
    cache_dir: PathText | None = Field(
        None,
        description="Folder of the tokenized data, on a file system that nodes share. Default: .data below run.root.",
    )

    def sources(self, *, for_eval: bool | None = None) -> list[tuple[str, SourceConfig]]:
        """List the sources of data.train, or of all eval sets, each with its key in the config. Default: both."""
        trained = [] if for_eval else list(self.train.sources("data.train"))
        evaluated = [] if for_eval is False else [own for sources in self.eval_sources.values() for own in sources]
        return [*trained, *evaluated]

    @property
    def eval_sources(self) -> dict[str, list[tuple[str, SourceConfig]]]:
        """Map the names of eval sets with data of their own to their sources, as in `sources`. "" is data.eval."""
        found = {} if self.eval is None else {"": list(self.eval.sources("data.eval"))}
        return found | {name: list(own.sources(f"data.eval_sets.{name}")) for name, own in self.eval_sets.items()}

    @property
    def judged_sources(self) -> list[tuple[str, SourceConfig]]:
        """List the sources of the eval sets, and also of data.train if a share of its prompts is held out."""
        return self.sources(for_eval=True if self.held_out is None else None)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Map each config key that names a Jinja file to the path of the file."""
        named = {"data": self.template, **{key: source.template for key, source in self.sources()}}
        return {f"{key}.template": file for key, file in named.items() if file not in (None, *_TEMPLATES)}

    @property
    def has_eval(self) -> bool:
        return bool(self.eval_sources) or self.held_out is not None
