"""The models and adapters that a deployment serves, by the names that calls use as their model.

A name is a model's, that of a LoRA adapter over a model, or either with a collection behind `@`.
The tokenizer of the first model stays loaded. The others are loaded in a thread when a call needs
one, and only the last used ones are kept. A plain call of the first model, or of an adapter over
it, runs nothing here: it finds its model in `ServedModels.resident`.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from schemas.errors import ConfigError, UnknownModel
from schemas.model.parsers import NO_PARSERS, ParserNames
from schemas.settings import ALIAS, MODEL_NAME_CHARS_MAX
from streams.calls.request.tokenizer import TOKENIZER_FILE, Encoder, Tokenizer

_NAMES_SHOWN_MAX = 16  # in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a model or an adapter while its tokenizer is not loaded."""

    name: str  # that calls use
    model: str  # that workers register
    adapter: str = ""  # over the model; empty: none
    root: str = ""  # of an adapter: its folder's name
    folder: Path = Path()  # of the model
    encoding: str = ""  # digest of tokenizer.json: models with one digest have the same tokens
    reads_passages: bool = True  # whether its tokens are the first model's, which passages have
    max_model_len: int
    created_s: int
    parsers: ParserNames = NO_PARSERS


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or an adapter with its tokenizer, for the intake of one call."""

    card: ModelCard
    tokenizer: Tokenizer


class Tokenizers:
    """The tokenizers of models, of which at most `loaded_max` are kept beside the first model's.

    Models with the same tokenizer.json share what is large, even if their templates differ.
    """

    def __init__(self, loaded_max: int) -> None:
        self._loaded_max = loaded_max
        self._loaded: OrderedDict[Path, Tokenizer] = OrderedDict()  # the last used one last
        self._encoders: WeakValueDictionary[str, Encoder] = WeakValueDictionary()
        self._loading = asyncio.Lock()  # one at a time: each takes a second of a core

    def load(self, card: ModelCard) -> Tokenizer:
        """Load the tokenizer of a model from its folder; raises ConfigError."""
        tokenizer = Tokenizer(card.folder, encoder=self._encoders.get(card.encoding))
        self._encoders[card.encoding] = tokenizer.encoder
        return tokenizer

    async def of(self, card: ModelCard) -> Tokenizer:
        """Return the tokenizer of a model, loaded in a thread if it is not kept."""
        if (tokenizer := self._loaded.get(card.folder)) is None:
            async with self._loading:
                if (tokenizer := self._loaded.get(card.folder)) is None:
                    tokenizer = await asyncio.to_thread(self.load, card)
                    self._loaded[card.folder] = tokenizer
        self._loaded.move_to_end(card.folder)
        while len(self._loaded) > self._loaded_max:
            self._loaded.popitem(last=False)
        return tokenizer


class ServedModels:
    """The catalog of a deployment. The first model is the default of calls that name none."""

    def __init__(
        self,
        default: ServedModel,
        other_cards: Iterable[ModelCard] = (),
        tokenizers: Tokenizers | None = None,
    ) -> None:
        """Set up the catalog; raises ConfigError for names that cannot be used."""
        self.default = default
        cards = [default.card, *other_cards]
        self.cards: Mapping[str, ModelCard] = {card.name: card for card in cards}
        _check_names([card.name for card in cards])
        self._tokenizers = tokenizers or Tokenizers(1)
        # those of which the tokenizer stays loaded; calls without a model get the default
        self.resident: Mapping[str | None, ServedModel] = {
            None: default,
            "": default,
            **{
                card.name: ServedModel(card, default.tokenizer)
                for card in cards
                if card.folder == default.card.folder
            },
            default.card.name: default,
        }
        self.len_max = max(card.max_model_len for card in cards)  # tokens of prompt and answer

    @property
    def models(self) -> list[str]:
        """Return the names of the models, without adapters."""
        return [card.name for card in self.cards.values() if not card.adapter]

    def find(self, name: str | None) -> tuple[ModelCard, str]:
        """Return the model or adapter of this name, and the collection in the name; raises
        UnknownModel."""
        if not name:
            return self.default.card, ""
        if (card := self.cards.get(name)) is not None:
            return card, ""
        base, _, collection = name.rpartition(ALIAS)
        if (card := self.cards.get(base)) is None or not collection:
            raise UnknownModel(
                f"model: expected {self._names()}, found {name[:80]!r}; for answers that are "
                f"looked up in a collection, {self._example()}{ALIAS}COLLECTION"
            )
        return card, collection

    def find_or_default(self, name: str | None) -> ModelCard:
        """Return the model or adapter of this name; the default if it is unknown."""
        try:
            return self.find(name)[0]
        except UnknownModel:
            return self.default.card

    async def of_call(self, name: str | None) -> tuple[ServedModel, str]:
        """Return what serves a call that names this model, and the collection in the name; raises
        UnknownModel."""
        card, collection = self.find(name)
        served = self.resident.get(card.name)
        return served or ServedModel(card, await self._tokenizers.of(card)), collection

    async def model_named(self, name: str | None) -> ServedModel:
        """Return the model or adapter of this name, which has no collection; raises
        UnknownModel."""
        if name and name not in self.cards:
            raise UnknownModel(f"model: expected {self._names()}, found {name[:80]!r}")
        served, _ = await self.of_call(name)
        return served

    def max_model_len(self, name: str) -> int:
        """Return the most tokens of prompt and answer together; of a model that is no longer
        served, the default's."""
        return self.cards.get(name, self.default.card).max_model_len

    def _names(self) -> str:
        names = [repr(name) for name in self.cards]
        if len(names) == 1:
            return names[0]
        first_names = ", ".join(names[:_NAMES_SHOWN_MAX])
        left_out = len(names) - _NAMES_SHOWN_MAX
        return f"one of {first_names}" + (
            f" and {left_out} more of /v1/models" if left_out > 0 else ""
        )

    def _example(self) -> str:
        return self.default.card.name if len(self.cards) == 1 else "NAME"


def encoding_of(folder: Path) -> str:
    """Return the digest of a model's tokenizer.json; raises ConfigError if there is none."""
    file = folder / TOKENIZER_FILE
    if not file.exists():
        raise ConfigError(f"{file}: no such file; the gateway needs a fast tokenizer of each model")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_names(names: list[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"models: expected different names, found {name[:80]!r} twice")
        if not name or len(name) > MODEL_NAME_CHARS_MAX or not name.isprintable():
            raise ConfigError(
                f"models: expected names of 1 to {MODEL_NAME_CHARS_MAX} printable characters, "
                f"found {name[:80]!r}"
            )
