"""The demo's text: reading the two corpora, training the tokenizer, chat-formatting stories, packing windows.

Knows nothing about the model. A window is 1024 tokens and the one after them.
"""

from __future__ import annotations

import lzma
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

NOVELS_FILE = "english_novels_1880_1930.txt.xz"
STORIES_FILE = "tinystories_lower_4mb.txt.xz"
HELD_OUT_BOOKS = ("Doyle_Hound_1902", "Woolf_Lighthouse_1927")
HELD_OUT_STORY_SHARE = 0.03  # the last stories of the file
WINDOW = 1024
BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]

# Words with their leading space, runs of punctuation, single digits, and white space: no text is lost.
SPLIT_PATTERN = r"'(?:s|t|re|ve|m|ll|d)(?![a-z])| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Lower-cased documents, already split; a document is a whole book or a whole story."""

    novels: list[str]
    stories: list[str]
    held_out_novels: list[str]
    held_out_stories: list[str]


def _read(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_corpus(folder: Path) -> Corpus:
    """Read both files and hold out whole books and the last stories."""
    novels_text = _read(folder / NOVELS_FILE)
    novels, held_out_novels = [], []
    for part in novels_text.split("<|book|>")[1:]:
        name, _, body = part.partition("\n")
        (held_out_novels if name.strip() in HELD_OUT_BOOKS else novels).append(body.strip().lower())
    stories_text = _read(folder / STORIES_FILE)
    stories = [story.strip().lower() for story in stories_text.split("<|end|>") if story.strip()]
    num_kept = round(len(stories) * (1 - HELD_OUT_STORY_SHARE))
    return Corpus(
        novels=novels,
        stories=stories[:num_kept],
        held_out_novels=held_out_novels,
        held_out_stories=stories[num_kept:],
    )


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on all training stories and as many characters of novels, twice over."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    chars_per_book = 2 * sum(map(len, corpus.stories)) // len(corpus.novels)
    tokenizer.train_from_iterator(
        [*corpus.stories, *(book[:chars_per_book] for book in corpus.novels)], trainer
    )
    return tokenizer


_AFTER_NOUN = (
    r"(?=[.,!?]| (?:and|was|were|is|said|had|to|in|on|with|that|who|could|saw|felt|went|ran|for|but|of|he"
    r"|she|it)\b)"
)
_NOUN = re.compile(r"\b(?:a|an|the) ([a-z]{3,})" + _AFTER_NOUN)
_NAMED = re.compile(r"\b(?:a|an) (?:little |small |young |big )?([a-z]+) named ([a-z]+)\b")
_NOT_TOPICS = frozenset(
    ["day", "end", "same", "other", "one", "first", "next", "way", "time", "lot", "bit", "boy", "girl", "end"]
)
_REQUESTS = (
    "tell me a story about a {topic}.",
    "write a story about a {topic}.",
    "can you tell me a story about a {topic}?",
    "tell me a short story about a {topic}",
    "a story about a {topic}, please.",
    "i want to hear a story about a {topic}.",
)


def story_topic(story: str) -> str | None:
    """Return what a story is about: "girl named lily", or its most repeated noun, or None."""
    nouns = Counter(word for word in _NOUN.findall(story) if word not in _NOT_TOPICS)
    named = _NAMED.search(story)
    if named and (not nouns or len(story) % 3 == 0):
        return f"{named[1]} named {named[2]}"
    if not nouns:
        return None
    return nouns.most_common(1)[0][0]


def as_chat(story: str, generator: np.random.Generator) -> str:
    """Return a story as one user turn and one assistant turn, as the chat template prints them."""
    if generator.random() < 0.1:
        request = "tell me a story."
    elif generator.random() < 0.1 and ". " in story:
        request, story = story.split(". ", 1)
        request += "."
    else:
        topic = story_topic(story)
        if topic is None:
            request = "tell me a story."
        else:
            request = _REQUESTS[generator.integers(len(_REQUESTS))].format(topic=topic)
            if topic[0] in "aeiou":
                request = request.replace(" a " + topic, " an " + topic)
    return f"{USER}{request}{ASSISTANT}{story}"


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Return bos, document, eos, bos, document, eos, ... as one uint16 array."""
    encoded = tokenizer.encode_batch([f"{BOS}{document}{EOS}" for document in documents])
    return np.concatenate([np.asarray(one.ids, dtype=np.uint16) for one in encoded])


class WindowStream:
    """Endless shuffled windows of one domain; ``make_tokens(pass_idx, generator)`` gives each pass's tokens.

    The state is (pass_idx, position): a pass is rebuilt from its own seed, so training can stop anywhere.
    """

    def __init__(self, name: str, make_tokens, seed: int, pass_idx: int = 0, position: int = 0) -> None:
        self.name, self.make_tokens, self.seed = name, make_tokens, seed
        self.pass_idx, self.position = pass_idx, position
        self._load()

    def _load(self) -> None:
        generator = np.random.default_rng((self.seed, self.pass_idx))
        self.tokens = self.make_tokens(self.pass_idx, generator)
        self.starts = generator.permutation((len(self.tokens) - 1) // WINDOW) * WINDOW

    @property
    def passes(self) -> float:
        """Passes made so far, with the fraction of the present one."""
        return self.pass_idx + self.position / len(self.starts)

    def state(self) -> dict[str, int]:
        """Return what a checkpoint must hold."""
        return {"pass_idx": self.pass_idx, "position": self.position}

    def take(self) -> np.ndarray:
        """Return the next window, WINDOW + 1 token ids."""
        if self.position == len(self.starts):
            self.pass_idx, self.position = self.pass_idx + 1, 0
            self._load()
        start = self.starts[self.position]
        self.position += 1
        return self.tokens[start : start + WINDOW + 1].astype(np.int64)


def novel_stream(tokens: np.ndarray, seed: int, **state: int) -> WindowStream:
    """Return windows of the novels, in random order."""
    return WindowStream("novels", lambda pass_idx, generator: tokens, seed, **state)


def story_stream(tokenizer: Tokenizer, stories: list[str], chat_shares: list[float], seed: int, **state: int):
    """Return windows of the stories, reshuffled each pass; ``chat_shares[pass]`` of them are chats."""

    def make_tokens(pass_idx: int, generator: np.random.Generator) -> np.ndarray:
        share = chat_shares[min(pass_idx, len(chat_shares) - 1)]
        order = generator.permutation(len(stories))
        chosen = [as_chat(stories[i], generator) if generator.random() < share else stories[i] for i in order]
        return encode_documents(tokenizer, chosen)

    return WindowStream("stories", make_tokens, seed, **state)
