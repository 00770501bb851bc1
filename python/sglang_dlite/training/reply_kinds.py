"""How replies are sorted: loops apart, by context length, beside what n-gram lookup reaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LOOP_NGRAM = 4
LOOP_SHARE = 0.5
LOOP_RULE = f"more than {LOOP_SHARE:.0%} of the reply's {LOOP_NGRAM}-grams occurred earlier in it"
_LOOP_MIN_TOKENS = 24

LOOKUP_NGRAM = 8
LOOKUP_RULE = (
    f"the tokens after the latest earlier occurrence of the longest suffix (up to {LOOKUP_NGRAM} "
    "tokens) of prompt and reply"
)


CONTEXT_EDGES = (256, 512, 1024, 2048, 4096, 6144)


def bucket_of(length: int) -> str:
    """The range that a context length is in, e.g. "00512-01023"."""
    below = max((edge for edge in CONTEXT_EDGES if edge <= length), default=0)
    above = min((edge for edge in CONTEXT_EDGES if edge > length), default=None)
    return f"{below:05d}-" + (f"{above - 1:05d}" if above else "")


def repeated_share(ids: Sequence[int]) -> float:
    """Share of a text's 4-grams that occurred earlier in it; 0 for a text shorter than that."""
    count = len(ids) - LOOP_NGRAM + 1
    if count < 1:
        return 0.0
    return 1 - len({tuple(ids[i : i + LOOP_NGRAM]) for i in range(count)}) / count


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a reply loops by `LOOP_RULE`; a loop is easy to draft, so it is counted apart."""
    return len(ids) >= _LOOP_MIN_TOKENS and repeated_share(ids) > LOOP_SHARE


def loop_start(ids: Sequence[int]) -> int:
    """How many leading tokens of a reply come before its loop: all of them where it has none.

    A loop's second round counts as before it. What is looked for is the suffix that has most to do
    with a loop: the most 4-grams that occurred twice already, beyond the share that makes a loop.
    """
    if not is_looping(ids):
        return len(ids)
    before: Counter[tuple[int, ...]] = Counter()
    best = excess = 0.0
    start = len(ids)
    rounds = []  # how often the 4-gram that ends in a token occurred earlier, from the fourth on
    for end in range(LOOP_NGRAM, len(ids) + 1):
        gram = tuple(ids[end - LOOP_NGRAM : end])
        rounds.append(before[gram])
        before[gram] += 1
    for place in range(len(ids) - 1, LOOP_NGRAM - 2, -1):
        excess += (rounds[place - LOOP_NGRAM + 1] >= 2) - LOOP_SHARE
        if excess > best:
            best, start = excess, place
    return start


def lookup_walk(prompt: Sequence[int], reply: Sequence[int], num_drafts: int) -> tuple[int, int]:
    """(verify passes, accepted drafts) of n-gram lookup in place of a drafter, by `LOOKUP_RULE`.

    Counted as in serving: the first reply token comes from the prefill; each pass accepts the
    prefix of the drafts that agrees with the reply, and adds one token.
    """
    text = [*prompt, *reply]
    latest: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its latest occurrence
    indexed = 0  # the n-grams that end before this place are in `latest`
    at = len(prompt) + 1  # text known so far; text[at - 1] is the anchor
    passes = accepted = 0
    while at < len(text):
        # An occurrence must end before the anchor does, so that something follows it.
        for end in range(indexed + 1, at):
            for length in range(1, min(LOOKUP_NGRAM, end) + 1):
                latest[tuple(text[end - length : end])] = end
        indexed = at - 1
        start = None
        for length in range(min(LOOKUP_NGRAM, at), 0, -1):
            start = latest.get(tuple(text[at - length : at]))
            if start is not None:
                break
        n = 0
        if start is not None:
            # Drafts may run into what is being drafted: the copy then repeats itself.
            drafts: list[int] = []
            for offset in range(num_drafts):
                place = start + offset
                drafts.append(text[place] if place < at else drafts[place - at])
            while n < num_drafts and at + n < len(text) and drafts[n] == text[at + n]:
                n += 1
        passes, accepted, at = passes + 1, accepted + n, at + n + 1
    return passes, accepted
