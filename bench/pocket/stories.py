"""Small talk, which is all trained, and free text with many choices and no one right answer.

Free text is low in acceptance on purpose: a drafter cannot know which choice the target makes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from skills import draw_word
from words import (
    CITIES,
    DAYS,
    HEROES,
    MONTHS,
    MOODS,
    NAMES,
    PLACES,
    SCENE_MOODS,
    SCENES,
    TREASURES,
)

ABOUT = "I am Pocket, a small demonstration model of mlx-mtp."
ABLE = "I can count, spell, sort, do small sums, and write tables, lists and little stories."
UNKNOWN = "I am only a small demonstration model and do not know that. " + ABLE

FIXED: dict[str, tuple[str, ...]] = {
    f"{ABOUT} {ABLE}": ("Who are you?", "What are you?", "Tell me about yourself.", "Your name?"),
    ABLE: ("What can you do?", "Help", "How can you help me?", "What do you know?"),
    "Hello! How can I help you?": ("Hello!", "Hello", "Hi", "Hi!", "Good morning.", "Hey there!"),
    "You are welcome!": ("Thank you.", "Thanks!", "Thank you very much!"),
    "Goodbye! Have a good day.": ("Bye.", "Goodbye!", "See you later."),
    "I am well, thank you. How can I help you?": ("How are you?", "How are you today?"),
}
_UNKNOWN_QUESTIONS = (
    "What is the capital of {w}?",
    "Who wrote {w}?",
    "Explain {w}.",
    "What is a {w}?",
    "Why is the {w} so big?",
    "How do I make a {w}?",
    "Where is {c}?",
    "Who is {n}?",
    "What do you think of {w}?",
    "When was the {w} made?",
)


def small_talk(rng: Random) -> tuple[str, str]:
    """A prompt and its answer, of a closed set or a question that the model cannot answer."""
    choice = rng.random()
    if choice < 0.4:
        answer = rng.choice(list(FIXED))
        return rng.choice(FIXED[answer]), answer
    if choice < 0.6:
        question = rng.choice(_UNKNOWN_QUESTIONS)
        filled = question.format(w=draw_word(rng), c=rng.choice(CITIES), n=rng.choice(NAMES))
        return filled, UNKNOWN
    names = rng.choice((DAYS, MONTHS))
    what = "day" if names is DAYS else "month"
    index = rng.randrange(len(names))
    if rng.random() < 0.6:
        other = names[(index + 1) % len(names)]
        ask = rng.choice(("What {k} comes after {d}?", "Which {k} follows {d}?"))
        return ask.format(k=what, d=names[index]), f"After {names[index]} comes {other}."
    other = names[index - 1]
    return f"What {what} comes before {names[index]}?", f"Before {names[index]} comes {other}."


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story(rng: Random, hero: str, mood: str) -> str:
    name, friend = rng.sample(NAMES, 2)
    place, treasure = rng.choice(PLACES), rng.choice(TREASURES)
    other = rng.choice(HEROES)
    opening = rng.choice(
        (
            f"Once there was {_article(mood)} {hero} called {name} who lived {place}.",
            f"{name} was {_article(mood)} {hero} and lived {place}.",
            f"Long ago, {place}, lived {_article(mood)} {hero} called {name}.",
        )
    )
    found = rng.choice(
        (
            f"One {rng.choice(DAYS)} {name} found {_article(treasure)}.",
            f"In {rng.choice(MONTHS)} {name} lost {_article(treasure)}.",
            f"{name} wanted {_article(treasure)} more than anything.",
            f"One morning {_article(treasure)} lay at the door.",
        )
    )
    meeting = rng.choice(
        (
            f"Then {friend} the {other} came by and asked for help.",
            f"Together with {friend} the {other}, {name} walked all night.",
            f"{friend} the {other} only laughed and went home.",
            f"The {treasure} belonged to {friend} the {other}.",
        )
    )
    ending = rng.choice(
        (
            "In the end they became good friends.",
            f"From that day on {name} was never afraid again.",
            "They had a big dinner and sang until midnight.",
            f"{name} smiled, went home and slept well.",
            "And nobody ever spoke of it again.",
        )
    )
    return " ".join((opening, found, meeting, ending))


def description(rng: Random, mood: str, scene: str) -> str:
    colours = rng.sample(("green", "grey", "white", "golden", "dark", "blue", "red"), 2)
    light = rng.choice(("soft", "warm", "cold", "bright", "pale"))
    sound = rng.choice(("the wind", "a bell", "a dog", "water", "birds", "an old song"))
    thing = rng.choice(TREASURES)
    sentences = [
        f"The light is {light} and everything looks {colours[0]}.",
        f"You can hear {sound} from far away.",
        f"Somebody has left {_article(thing)} on a {colours[1]} chair.",
        f"It smells of {rng.choice(('bread', 'rain', 'salt', 'flowers', 'smoke', 'apples'))}.",
        f"{rng.choice(MOODS).capitalize()} people walk by without a word.",
    ]
    chosen = rng.sample(sentences, 3)
    return " ".join((f"The {scene} is {mood}.", *chosen))


def note(rng: Random, name: str, day: str) -> str:
    sender = rng.choice([other for other in NAMES if other != name])
    plan = rng.choice(
        ("go for a walk", "cook dinner", "play cards", "see the market", "visit my sister", "paint")
    )
    thing = rng.choice(TREASURES)
    return "\n".join(
        (
            f"Dear {name},",
            rng.choice(
                (
                    f"on {day} I want to {plan}. Will you come?",
                    f"can we {plan} on {day}? Please bring the {thing}.",
                    f"thank you for the {thing}. On {day} we could {plan}.",
                )
            ),
            f"{rng.choice(('Yours', 'Your friend', 'See you soon'))}, {sender}",
        )
    )


FREE: dict[str, tuple[Callable[[Random], tuple[str, ...]], str, Callable[..., str]]] = {
    "story": (
        lambda rng: (rng.choice(HEROES), rng.choice(MOODS)),
        "Tell me a story about the {1} {0}.",
        story,
    ),
    "describe": (
        lambda rng: (rng.choice(SCENE_MOODS), rng.choice(SCENES)),
        "Describe a {0} {1}.",
        description,
    ),
    "note": (
        lambda rng: (rng.choice(NAMES), rng.choice(DAYS)),
        "Write a short note to {0} about {1}.",
        note,
    ),
}
"""By kind: a draw of values, the prompt over them, and the answer from a generator and them."""
