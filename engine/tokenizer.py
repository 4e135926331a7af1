"""Tokenizer: text to token ids and back, and conversations to prompts.

One pipeline for every source: the ``tokenizers`` library running tokenizer.json itself, or what was rebuilt from a GGUF
file. Tokenizer classes that rebuild the pipeline from a vocabulary are avoided: they lose what the file says, such as
the splitting of digits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Pipeline

from ..errors import CheckpointError, ConfigError, UnsupportedError
from .chat_template import ChatTemplate, read_override, read_templates, stored_templates
from .detokenizer import IncrementalDetokenizer
from .grammar.vocabulary import Vocabulary, last_token
from .model_config import read_json
from .sampling_params import SamplingParams
from .sources.model_files import ModelFiles
from .token_bytes import TokenBytes

# The library holds Python's lock in ``encode`` but not in ``encode_batch``: a long text must not stop other threads.
_LONG_TEXT = 2000
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Everything that a tokenizer may consist of in a model folder.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


class Tokenizer:
    """``settings`` are those of tokenizer_config.json; ``directory`` is where the model's own files lie, if it has any.

    Decoding invents nothing: no space is put around added tokens, and ``clean_up_tokenization_spaces`` is not followed,
    because it would change text that the model wrote.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Mapping[str, Any], template: ChatTemplate, directory: Path | None = None
    ) -> None:
        self._pipeline = pipeline
        self._settings = dict(settings)
        self._template = template
        self._directory = directory
        added = pipeline.get_added_tokens_decoder()
        self._bytes = TokenBytes(pipeline, added)
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size: int = last_token(pipeline) + 1
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @property
    def accepts_parts(self) -> bool:
        """Whether the chat template takes content as a list of parts."""
        return self._template.accepts_parts

    def prepare_chat(self) -> None:
        """Do now what the first conversation would wait for."""
        _ = self._template.accepts_parts, self.max_token_length

    @property
    def has_chat_template(self) -> bool:
        return self._template.is_defined

    @property
    def template_text(self) -> str:
        """The source of the chat templates, for those who look for signs of a model's ways."""
        return self._template.text

    @property
    def special_texts(self) -> frozenset[str]:
        """The texts of the special tokens."""
        return frozenset(self.token_text(token) for token in self.special_ids)

    @property
    def max_token_length(self) -> int:
        """Bytes of the longest token: a text of more than n times as many bytes has more than n tokens."""
        return self._bytes.longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the special tokens (BOS ...) that the tokenizer adds by itself, or without."""
        if len(text) > _LONG_TEXT:
            return self._pipeline.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self._pipeline.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts as the tokenizer joins them, special tokens and all."""
        return self._pipeline.encode(first, second).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; incomplete UTF-8 becomes U+FFFD. Only tokens flagged special are ever skipped."""
        text = self._pipeline.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if len(ids) < 2 or "\ufffd" not in text:
            return text
        # For one bad byte the library gives up a whole run of byte tokens; here the good characters in it stay.
        whole = IncrementalDetokenizer(self, (), SamplingParams(skip_special_tokens=skip_special_tokens))
        return whole.push(ids) + whole.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for, possibly part of a character; none for an id that is no token."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """``token_bytes`` as text, with U+FFFD for parts of characters."""
        return self._bytes[token_id].decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. RequestError when the model has no template or the template refuses it."""
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of ``render_chat``; the template writes all special tokens, so none is added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def save(self, directory: Path) -> None:
        """Write the files that any Hugging Face loader reads; a model's own are copied as they are."""
        directory.mkdir(parents=True, exist_ok=True)
        if self._directory is not None:
            for name in FILES:
                if (self._directory / name).is_file():
                    shutil.copyfile(self._directory / name, directory / name)
            return
        self._pipeline.save(str(directory / "tokenizer.json"))
        text = json.dumps(self._settings, ensure_ascii=False, indent=2)
        (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _special_id(self, name: str) -> int | None:
        text = _token_text(self._settings.get(name))
        return None if text is None else self._pipeline.token_to_id(text)


def load_tokenizer(files: ModelFiles, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model; ``chat_template`` (a file or the template itself) replaces the model's own.

    CheckpointError when there are no tokenizer files, UnsupportedError when they are of a kind that is not served,
    ConfigError when ``chat_template`` cannot be read or parsed.
    """
    pipeline, settings = _load_pipeline(files)
    _apply_bos_eos(pipeline, settings)
    directory = files.path if files.kind == "directory" else None
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None}
    if chat_template is not None:
        template = ChatTemplate(*read_override(chat_template), special)
        template.check_syntax()
    elif directory is not None:
        template = ChatTemplate(*read_templates(directory, settings), special)
    else:
        template = ChatTemplate(stored_templates(settings.get("chat_template")), files.path.name, special)
    return Tokenizer(pipeline, settings, template, directory)


def vocabulary_size(files: ModelFiles) -> int:
    """``Tokenizer.vocab_size`` alone, for a process that never sees text."""
    return last_token(_load_pipeline(files)[0]) + 1


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """The tokens alone, for a process that sees no text but in grammars: the size now, the rest when one comes."""
    return Vocabulary(lambda: _load_pipeline(files)[0], vocabulary_size(files))


def _load_pipeline(files: ModelFiles) -> tuple[Pipeline, dict[str, Any]]:
    """The pipeline as stored, and the settings beside it."""
    if files.kind == "gguf":
        from .gguf_tokenizer import build_tokenizer, tokenizer_settings
        from .weights.gguf_file import open_gguf

        file = open_gguf(files.path)
        return build_tokenizer(file), tokenizer_settings(file)
    settings = _directory_settings(files.path)
    return _directory_pipeline(files.path, settings), settings


def _directory_settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= {key: value for key, value in read_json(directory / name).items() if value is not None}
    return settings


def _directory_pipeline(directory: Path, settings: Mapping[str, Any]) -> Pipeline:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return _converted_pipeline(directory)
    try:
        pipeline = Pipeline.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
    pipeline.no_truncation()
    pipeline.no_padding()
    _add_declared_tokens(pipeline, settings)
    return pipeline


def _converted_pipeline(directory: Path) -> Pipeline:
    """A tokenizer without tokenizer.json, converted by transformers from its vocabulary files."""
    if not any((directory / name).is_file() for name in ("vocab.json", "tokenizer.model", "vocab.txt")):
        raise CheckpointError(f"{directory} holds no tokenizer.json, and no vocabulary to make one from")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # whatever the conversion stumbles over
        raise UnsupportedError(f"the tokenizer in {directory} cannot be converted: {error}") from None
    pipeline = getattr(converted, "backend_tokenizer", None)
    if not isinstance(pipeline, Pipeline):
        raise UnsupportedError(f"the tokenizer in {directory} has no fast form; save a tokenizer.json beside it")
    return pipeline


def _add_declared_tokens(pipeline: Pipeline, settings: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json lacks or flags otherwise."""
    known = pipeline.get_added_tokens_decoder()
    for token_id, declared in sorted(
        (settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        token = AddedToken(**{key: value for key, value in declared.items() if key != "__type"})
        current = known.get(int(token_id))
        if current is not None and current.content == token.content and current.special == token.special:
            continue
        (pipeline.add_special_tokens if token.special else pipeline.add_tokens)([token])


def _apply_bos_eos(pipeline: Pipeline, settings: Mapping[str, Any]) -> None:
    """Follow explicit ``add_bos_token`` and ``add_eos_token``; where one is absent, the pipeline's own rule stands."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    current = pipeline.encode("", add_special_tokens=True).ids
    bos = _wanted_token(pipeline, settings, "bos", current[:1])
    eos = _wanted_token(pipeline, settings, "eos", current[-1:])
    special = [token for token in (bos, eos) if token is not None]
    if current == [index for _, index in special]:
        return
    pieces = [bos[0] if bos else None, "$A", eos[0] if eos else None]
    single = [piece for piece in pieces if piece is not None]
    pipeline.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _wanted_token(
    pipeline: Pipeline, settings: Mapping[str, Any], name: str, current: list[int]
) -> tuple[str, int] | None:
    """(text, id) of the BOS or EOS token if it is to be added; ``current`` is what is added at that end now."""
    text = _token_text(settings.get(f"{name}_token"))
    index = None if text is None else pipeline.token_to_id(text)
    if text is None or index is None or not settings.get(f"add_{name}_token", index in current):
        return None
    return text, index


def _token_text(token: Any) -> str | None:
    """A special token as the config spells it: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None
