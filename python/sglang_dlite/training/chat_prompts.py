# ruff: noqa: E501 (lists of prompt texts)
"""Templated chat prompts over everyday topics: no data set needed.

They widen what `self-instruct` gives (which leans towards advice): writing, role play, reasoning,
mathematics, extraction, science and the humanities.
"""

from __future__ import annotations

import random

from sglang_dlite.training.prompts import Prompt, single_turn

_TOPICS = (
    "a lost umbrella", "the first day at school", "a village library", "an old lighthouse",
    "climate change", "electric bicycles", "the city park", "a new bakery", "remote work",
    "a family dinner", "a power cut", "a mountain hike", "the night bus", "a broken clock",
    "learning the piano", "growing tomatoes", "a stray cat", "public transport", "space travel",
    "sleep and health", "a job interview", "a birthday party", "a noisy neighbour", "a long train ride",
)  # fmt: skip
_SCIENCE = (
    "photosynthesis", "gravity", "plate tectonics", "the water cycle", "vaccines", "DNA", "black holes",
    "electromagnetism", "natural selection", "chemical bonds", "the greenhouse effect", "entropy",
    "binary search", "hash tables", "the internet", "neural networks", "batteries", "semiconductors",
    "the immune system", "sound waves", "acids and bases", "Newton's laws", "the periodic table",
    "tides", "cell division", "refraction of light", "recursion", "relational databases",
)  # fmt: skip
_HUMANITIES = (
    "the French Revolution", "the Silk Road", "the Renaissance", "inflation", "supply and demand",
    "the Cold War", "utilitarianism", "the Industrial Revolution", "Shakespeare's tragedies",
    "the Roman Republic", "human rights", "the Great Depression", "stoicism", "the printing press",
    "colonialism", "impressionism", "opportunity cost", "the separation of powers", "free trade",
    "the Enlightenment", "Greek mythology", "the Black Death", "social contract theory", "haiku poetry",
)  # fmt: skip
_ROLES = (
    "a ship's captain", "a strict piano teacher", "a medieval blacksmith", "a travel agent",
    "a detective in the 1920s", "a friendly robot", "a sports commentator", "a museum guide",
    "a grandmother who loves to cook", "a tired night watchman", "a school principal", "a poet",
    "a doctor", "a mathematician who loves puzzles", "a football coach", "a gardener",
)  # fmt: skip
_NAMES = ("Anna", "Omar", "Li", "Maria", "Ben", "Chidi", "Sofia", "Tom", "Yuki", "Fatima")
_THINGS = ("pencils", "oranges", "stamps", "coins", "books", "marbles", "tickets", "eggs")

_WRITING = (
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write a persuasive email to a friend about {topic}.",
    "Write an introduction for a blog article on {topic}.",
    "Describe {topic} in vivid detail for readers who have never seen it.",
    "Write a letter to the editor of a newspaper about {topic}.",
    "Give me five headline ideas for an article about {topic}.",
    "Write a dialogue between two friends about {topic}.",
    "What are the advantages and disadvantages of {topic}? Answer in a structured way.",
)
_EXPLAIN = (
    "Explain {topic} in simple terms.",
    "What is {topic} and why does it matter?",
    "Give me an overview of {topic} with three examples.",
    "Write five quiz questions about {topic}, with answers.",
    "How would you teach {topic} to a class of twelve-year-olds?",
    "What are common misunderstandings about {topic}?",
    "Compare {topic} with {other}.",
    "Describe the history of {topic}.",
)
_ROLE_PLAY = (
    "Pretend to be {role}. Tell me about {topic}.",
    "You are {role}. A visitor asks you about {topic}. What do you say?",
    "Act as {role} and give advice on {topic}.",
    "I want you to be {role}. Introduce yourself and ask me three questions.",
)


def chat_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` distinct prompts, kinds in rotation, in a random but repeatable order."""
    rng = random.Random(f"chat-{seed}")
    makers = (_writing, _science, _humanities, _role_play, _reasoning, _arithmetic, _extraction)
    texts: dict[str, None] = {}  # an ordered set
    for attempt in range(20 * count):
        if len(texts) == count:
            break
        texts.setdefault(makers[attempt % len(makers)](rng))
    return [single_turn(f"chat/{index}", "chat", text) for index, text in enumerate(texts)]


def _writing(rng: random.Random) -> str:
    return rng.choice(_WRITING).format(topic=rng.choice(_TOPICS))


def _science(rng: random.Random) -> str:
    topic, other = rng.sample(_SCIENCE, 2)
    return rng.choice(_EXPLAIN).format(topic=topic, other=other)


def _humanities(rng: random.Random) -> str:
    topic, other = rng.sample(_HUMANITIES, 2)
    return rng.choice(_EXPLAIN).format(topic=topic, other=other)


def _role_play(rng: random.Random) -> str:
    topic = rng.choice(_TOPICS + _SCIENCE)
    return rng.choice(_ROLE_PLAY).format(role=rng.choice(_ROLES), topic=topic)


def _reasoning(rng: random.Random) -> str:
    a, b, c = rng.sample(_NAMES, 3)
    trait = rng.choice(("taller", "older", "faster", "richer", "stronger"))
    return rng.choice(
        (
            f"{a} is {trait} than {b}, and {b} is {trait} than {c}. Is {a} {trait} than {c}? Explain.",
            f"{a}, {b} and {c} sit in a row. {b} is not at an end. Who sits in the middle, and why?",
            f"If every {trait} person gets a prize and {a} got no prize, what follows about {a}?",
            f"{a} says that {b} lies. {b} says that {c} lies. {c} says that both lie. Who tells the truth?",
            f"Which word does not belong: {', '.join(rng.sample(_THINGS, 3))}, cloud? Give a reason.",
        )
    )


def _arithmetic(rng: random.Random) -> str:
    a, b, c = (rng.randint(2, 40) for _ in range(3))
    who, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    return rng.choice(
        (
            f"{who} has {a + b} {thing} and gives away {b}. How many {thing} are left?",
            f"Solve for x: {a}x + {b} = {a * c + b}.",
            f"What is the area of a rectangle with sides {a} cm and {b} cm?",
            f"A shop sells {thing} at {a} cents each. {who} buys {b}. What does {who} pay?",
            f"What is {a}% of {b * 10}? Show your work.",
            f"A train travels {a * 10} km in {rng.randint(2, 9)} hours. What is its average speed?",
        )
    )


def _extraction(rng: random.Random) -> str:
    people = rng.sample(_NAMES, 3)
    rows = [f"{name} ordered {rng.randint(2, 30)} {rng.choice(_THINGS)}" for name in people]
    form = rng.choice(("a JSON object", "a table", "a CSV file", "a bulleted list"))
    topic = rng.choice(_TOPICS)
    return rng.choice(
        (
            f"Turn this text into {form}: {'. '.join(rows)}.",
            f"Extract the names from this text: {'. '.join(rows)}.",
            f"Who ordered the most? {'. '.join(rows)}.",
            f"Is this review positive or negative? 'The article on {topic} was {rng.choice(('dull', 'great', 'far too long', 'a joy to read'))}.'",
        )
    )
