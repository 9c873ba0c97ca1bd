"""The tokens that the simulated engine samples, and the text of each.

It samples only tokens whose text is whole characters, so an answer's text never lags its tokens. A
`Writer` serves answers that need more: stop strings, stop tokens, made-up log-probabilities, and
given tokens instead of sampled ones (`Script`). Pure, except that it reads the model's folder.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from schemas.errors import ConfigError
from schemas.records import Sampling, TokenLogprob, TopLogprob
from workers.llm.engine import Job
from workers.llm.pieces import TextSteps
from workers.llm.sim.arena import MASK, mix
from workers.llm.stop_strings import StopText
from workers.models.sim import END, SIM_MODEL, WORDS, make_tokenizer

_WORDS_MIN = 64  # with fewer of `WORDS` as tokens, all printable tokens are sampled
_SIZE_MAX = 4_096  # tokens that may be sampled: more would only cost memory
_UNIT = float(1 << 64)
Script = Sequence[tuple[int, str]]  # token ids with their texts; the end of sequence comes last


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens that may be sampled; the end of sequence is the last entry, at index `size`."""

    ids: tuple[tuple[int, ...], ...]  # one-element tuples, shared by all outputs
    texts: tuple[str, ...]
    special_texts: tuple[str, ...]  # as `texts`, with the end of sequence spelled out
    size: int
    tokenizer: Tokenizer = field(compare=False)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Return the id of the end-of-sequence token, as a tuple."""
        return self.ids[self.size]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, or of a script's tokens."""
        sampled = self.sampled_texts(token_ids)
        return str(self.tokenizer.decode(list(token_ids))) if sampled is None else "".join(sampled)

    def sampled_texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None if one of them is never sampled."""
        token_texts = {token[0]: text for token, text in zip(self.ids, self.texts, strict=True)}
        if token_texts.keys() >= set(token_ids):
            return [token_texts[token] for token in token_ids]
        return None

    def script(self, text: str) -> Script:
        """Return the tokens of a text; a character of several tokens is with the last of them."""
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoded.offsets[1:]]
        pieces = [text[a:b] for a, b in pairwise([0, *starts, len(text)])]
        end = (self.ids[self.size][0], "")
        return (*zip(encoded.ids, pieces, strict=True), end) if encoded.ids else (end,)

    def allowed_script(
        self, sampling: Sampling, seed: int, count: int, end_every_tokens: int
    ) -> Script:
        """Draw up to `count` tokens from the sampling's allowed ones; fewer if their end is drawn.

        The end of sequence is drawn like that of other answers if it is allowed, or if nothing
        else is.
        """
        (end,) = self.end_ids
        word_ids = [token for token in sampling.allowed_token_ids if token != end] or [end]
        may_end = end in sampling.allowed_token_ids
        stream = DecodeStream(skip_special_tokens=sampling.skip_special_tokens)
        tokens: list[tuple[int, str]] = []
        for place in range(count):
            raw = mix((seed + place) & MASK)
            is_end = may_end and end_every_tokens and (raw >> 40) % end_every_tokens == 0
            token = end if is_end else word_ids[raw % len(word_ids)]
            if token == end and place >= sampling.min_tokens and not sampling.ignore_eos:
                return (*tokens, (end, ""))
            tokens.append((token, stream.step(self.tokenizer, token) or ""))
        return tokens


def load_vocabulary(path: str, size_max: int = _SIZE_MAX) -> Vocabulary:
    """Return the vocabulary of a model folder, or of the built-in tokenizer.

    It has at most `size_max` tokens besides the end of sequence. Raises ConfigError.
    """
    if path == SIM_MODEL:
        tokenizer, end = make_tokenizer(), END
    else:
        tokenizer, end = _read_folder(Path(path))
    end_id = tokenizer.token_to_id(end)
    if end_id is None:
        raise ConfigError(f"{path}: expected the end-of-sequence token {end!r} in tokenizer.json")
    special = set(tokenizer.get_added_tokens_decoder())
    pieces = _pieces(tokenizer, [i for i in range(tokenizer.get_vocab_size()) if i not in special])
    spaced_words = {" " + word for word in WORDS}
    words = [pair for pair in pieces if pair[1] in spaced_words]
    drawable_tokens = (words if len(words) >= _WORDS_MIN else pieces)[:size_max]
    if len(drawable_tokens) < 2:
        raise ConfigError(
            f"{path}: expected at least 2 printable tokens, found {len(drawable_tokens)}"
        )
    ids = [token_id for token_id, _ in drawable_tokens] + [end_id]
    texts = [text for _, text in drawable_tokens]
    return Vocabulary(
        ids=tuple((token_id,) for token_id in ids),
        texts=(*texts, ""),
        special_texts=(*texts, end),
        size=len(drawable_tokens),
        tokenizer=tokenizer,
    )


def _read_folder(folder: Path) -> tuple[Tokenizer, str]:
    """Return the folder's tokenizer and its end-of-sequence token."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except Exception as error:  # tokenizers raises plain Exception for a missing or malformed file
        raise ConfigError(
            f"model.path {folder}: the simulated engine expected tokenizer.json and "
            f"tokenizer_config.json in this folder; name one that has them, or `tiny`: {error}"
        ) from error
    end = config.get("eos_token")
    return tokenizer, end["content"] if isinstance(end, dict) else str(end)


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, str]]:
    """Return the tokens that are printable by themselves, with their text inside an answer."""
    if not ids:
        return []
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    lead = len(tokenizer.decode(anchor, skip_special_tokens=False))
    texts = tokenizer.decode_batch([[*anchor, i] for i in ids], skip_special_tokens=False)
    return [
        (token_id, text[lead:])
        for token_id, text in zip(ids, texts, strict=True)
        if text[lead:].replace("\n", " ").isprintable() and text[lead:] and "\ufffd" not in text
    ]


class Writer:
    """Text, log-probabilities and stop conditions of one answer that needs them."""

    def __init__(self, job: Job, vocabulary: Vocabulary, script: Script = ()) -> None:
        sampling = job.sampling
        self._job, self._sampling = job, sampling
        self._vocabulary, self._script = vocabulary, script
        self.stops = StopText(sampling.stop, include_stop=sampling.include_stop)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        if job.continues_stops:
            self.stops.take_prior(
                self._prior_texts(), min_tokens=sampling.min_tokens, sent_chars=job.prior_chars
            )

    def _prior_texts(self) -> list[str]:
        """Return the text of each of the answer's prior tokens."""
        prior = self._job.prompt_tokens[-self._job.prior_tokens :]
        if self._script:
            return [text for _, text in self._script[: len(prior)]]
        sampled = self._vocabulary.sampled_texts(prior)
        if sampled is not None:
            return sampled
        steps = TextSteps(self._vocabulary.text, ())
        return [steps.step(token) for token in prior]

    @staticmethod
    def is_needed(sampling: Sampling) -> bool:
        """Return whether an answer has stop conditions, log-probabilities or a script."""
        asks = sampling.logprobs is not None or sampling.structured is not None
        ids = sampling.stop_token_ids or sampling.allowed_token_ids
        return bool(sampling.stop or ids or asks)

    def latest_token(self, pick: int, token_count: int) -> tuple[int, str, str]:
        """Return id and text of the latest token, and its text with special tokens spelled out."""
        if self._script and token_count < len(self._script):
            token_id, text = self._script[token_count - 1]
            return token_id, text, text
        if self._script:
            pick = self._vocabulary.size
        vocabulary = self._vocabulary
        return vocabulary.ids[pick][0], vocabulary.texts[pick], vocabulary.special_texts[pick]

    def feed(self, pick: int, token_count: int) -> tuple[str, str | None]:
        """Return the text that may be shown, and the reason to stop or None."""
        token_id, plain_text, special = self.latest_token(pick, token_count)
        may_stop = token_count > self._sampling.min_tokens
        if token_id in self._stop_ids and may_stop:
            piece = special if self._sampling.include_stop else ""
            return self.stops.feed(piece, may_stop=False) + self.stops.flush(), str(token_id)
        text = self.stops.feed(plain_text, may_stop=may_stop)
        return text, self.stops.matched_stop or None

    def flush(self) -> str:
        """Return the text held back; for an answer that has ended."""
        return self.stops.flush()

    def logprobs(self, pick: int, raw: int, token_count: int) -> Sequence[TokenLogprob]:
        """Return made-up log-probabilities of the sampled token and its alternatives."""
        count = self._sampling.logprobs
        if count is None:
            return ()
        size = self._vocabulary.size + 1
        share = 0.35 + 0.6 * mix(raw) / _UNIT
        token_id, _, token = self.latest_token(pick, token_count)
        chosen = TopLogprob(token_id=token_id, token=token, logprob=math.log(share))
        rivals_count = max(0, min(count, size) - 1)
        first = pick + 1 + mix((raw + 1) & MASK) % (size - rivals_count)
        rivals = [(first + i) % size for i in range(rivals_count)]
        tops = [self._top(at, (1 - share) * 0.5 ** (i + 1)) for i, at in enumerate(rivals)]
        top = (chosen, *tops) if count else ()
        return (
            TokenLogprob(
                token_id=chosen.token_id, token=chosen.token, logprob=chosen.logprob, top=top
            ),
        )

    def _top(self, pick: int, share: float) -> TopLogprob:
        return TopLogprob(
            token_id=self._vocabulary.ids[pick][0],
            token=self._vocabulary.special_texts[pick],
            logprob=math.log(share),
        )
