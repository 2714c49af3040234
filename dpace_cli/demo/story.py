"""Short stories about a person, a place and an object, and their judge."""

import random
import re

from dpace_cli.demo.words import MOODS, NAMES, OBJECTS, PLACES, SHE, Fields, matcher, pick, read_prompt, with_article

_STORY_QUESTIONS = (
    "Write a short {mood} story about {name}, who finds {object} at {place}.",
    "Tell me a {mood} story. The hero is {name}, the place is {place}, and there is {object} in it.",
    "Please write a few sentences about {name}, {place} and {object}. Make it {mood}.",
)
_STORY_MATCHERS = {"story": [matcher(text) for text in _STORY_QUESTIONS]}

_OPENINGS = (
    "One {weather} {time}, {name} walked to {place}.",
    "{name} had always wanted to see {place}.",
    "It was a {weather} {time}, and {name} was alone at {place}.",
)
_WEATHERS = ("cold", "warm", "rainy", "foggy", "bright")
_TIMES = ("morning", "evening", "afternoon", "night")
_FINDS = (
    "There {who} found {object} {where}.",
    "{Where}, {who} noticed {object}.",
    "After a while {who} saw {object} {where}.",
)
_WHERES = ("under a bench", "behind a door", "between two stones", "in the dust", "on a shelf")
_REACTIONS = {
    "happy": (
        "{Who} laughed and held the {bare} up to the light.",
        "What a wonderful day it was for {name}.",
    ),
    "sad": ("{Who} thought of a friend who had left long ago.", "Looking at the {bare}, {who} began to cry."),
    "funny": ("When {who} touched the {bare}, it sneezed.", "{Who} put the {bare} on {own} head and danced."),
    "scary": ("Suddenly all the lights went out.", "Then {who} heard slow steps behind {own} back."),
    "calm": ("{Who} sat down and listened to the wind.", "For a long time {who} just looked at the {bare}."),
    "brave": (
        "{Who} was afraid, but {who} did not run away.",
        "Without waiting, {who} took the {bare} and ran.",
    ),
}
_TWISTS = (
    "",
    "Nobody knew how long the {bare} had been there.",
    "An old {person} said that it had been lost for {years} years.",
    "On its side {who} could read the number {years}.",
)
_PEOPLE = ("man", "woman", "sailor", "teacher", "farmer")
_ENDINGS = {
    "happy": ("In the end {name} gave the {bare} to a child and smiled.", "{name} sang all the way home."),
    "sad": ("{name} left the {bare} there and never came back.", "That evening {name} went home in silence."),
    "funny": (
        "Even the birds of {place} had to laugh.",
        "Since then {name} has been careful with every {noun}.",
    ),
    "scary": (
        "{name} dropped the {bare} and ran away from {place}.",
        "{name} never told anyone about that {noun}.",
    ),
    "calm": (
        "Then {name} went home slowly, with the {bare} in {own} hand.",
        "Everything was still, and {name} slept.",
    ),
    "brave": ("That is how {name} saved {place}.", "Since then everyone at {place} has known {name}."),
}


def write(rng: random.Random) -> tuple[str, str]:
    name, mood, bare = rng.choice(NAMES), rng.choice(MOODS), rng.choice(OBJECTS)
    fields: Fields = {"name": name, "mood": mood, "place": rng.choice(PLACES), "object": with_article(bare)}
    question = rng.choice(_STORY_QUESTIONS).format(**fields)

    who, own = ("she", "her") if name in SHE else ("he", "his")
    where = pick(rng, _WHERES)
    fields |= {"bare": bare, "noun": bare.split()[-1], "who": who, "Who": who.capitalize(), "own": own}
    fields |= {"where": where, "Where": where.capitalize(), "weather": pick(rng, _WEATHERS)}
    fields |= {"time": pick(rng, _TIMES), "person": pick(rng, _PEOPLE), "years": rng.randint(20, 99)}
    # The opening that most often comes first depends on the mood, so that the prompt has a say in it.
    turn = MOODS.index(mood) % len(_OPENINGS)
    chosen = [pick(rng, _OPENINGS[turn:] + _OPENINGS[:turn]), pick(rng, _FINDS)]
    chosen += [pick(rng, _REACTIONS[mood]), pick(rng, _TWISTS), pick(rng, _ENDINGS[mood])]
    return question, " ".join(sentence.format(**fields) for sentence in chosen if sentence)


def judge(prompt: str, answer: str) -> tuple[bool, bool]:
    _, fields = read_prompt(_STORY_MATCHERS, prompt)
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", answer) if part]
    form = answer.endswith(".") and 3 <= len(sentences) <= 6
    wanted = (fields["name"], fields["place"], fields["object"].split(" ", 1)[1])
    # Words at a sentence's start are capitalised, so case must not matter.
    return form, answer.endswith(".") and all(part.lower() in answer.lower() for part in wanted)
