"""Talk without an image: what the model says of itself, and of what it cannot know."""

from __future__ import annotations

from random import Random

from training.tiny_vl.lesson import Ask, any_of, listed
from training.tiny_vl.shapes import COLOURS, KINDS, PLURALS
from training.tiny_vl.words import THINGS

WHO = "I am Tilewright's tiny model. I look at simple drawn pictures and answer questions about them."
WHAT = (
    "I can count shapes, name their colours and places, compare two pictures, read short words and numbers, "
    "read bar charts and follow short clips."
)
NO_IMAGE = "I can't see a picture. Please add one."
TOO_HARD = "I don't know that. I only answer questions about simple drawn pictures."
HELLO = "Hello! Show me a picture and ask me about it."
THANKS = "You are welcome."
BYE = "Goodbye!"

TALKS = (
    (WHO, (
        "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?",
        "Which model are you?", "What model is this?", "Introduce yourself.", "Who made you?", "Are you an AI?",
        "Are you ChatGPT?", "What is this?", "what are you", "who are you",
    )),
    (WHAT, (
        "What can you do?", "What can you do for me?", "How can you help me?", "What are you good at?", "Help.",
        "What should I ask you?", "What can I ask?", "Can you help me?", "What do you know?", "What are your limits?",
        "what can you do", "help", "How does this work?",
    )),
    (HELLO, (
        "Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Good evening", "Hi there", "hello", "hi",
        "Hello there!", "How are you?", "Good day", "hey there",
    )),
    (THANKS, (
        "Thanks!", "Thank you.", "Thank you!", "thanks", "Great, thanks.", "Thanks a lot!", "Thank you so much.",
        "thank you so much", "Thanks, that helps.", "Great!", "Well done.", "Good job!",
    )),
    (BYE, ("Goodbye", "Bye", "Bye!", "See you.", "Good night", "Goodbye!")),
)  # fmt: skip
VERBS = listed("""
    write explain translate calculate make find draw summarise prove solve play sing buy cook build learn
""")
MATTERS = (
    "a poem", "a story", "this sentence", "the news", "a song", "the weather", "a joke", "an email", "a program",
    "the answer", "a recipe", "physics", "history", "the stock market", "a letter", "Python code", "an essay", "a plan",
)  # fmt: skip
PLACES = listed("""
    France Italy Spain Japan Brazil Canada Egypt India Kenya Norway Peru China Berlin Paris London Rome
""")


def talk(rng: Random) -> Ask:
    way = rng.random()
    if way < 0.45:
        answer, wordings = rng.choice(TALKS)
        return Ask("text", rng.choice(wordings), answer)
    if way < 0.7:
        return Ask("text", _about_an_image(rng), NO_IMAGE)
    return Ask("text", too_hard_question(rng), TOO_HARD)


def _about_an_image(rng: Random) -> str:
    kind, colour, word = rng.choice(KINDS), rng.choice(tuple(COLOURS)), any_of(rng, "colour", "color")
    return any_of(
        rng,
        f"What {word} is the {kind}?",
        f"Where is the {colour} {kind}?",
        f"How many {PLURALS[kind]} are there?",
        "What is in the picture?",
        "Describe the picture.",
        "What do you see?",
        "What does it say?",
        "Read the text.",
        "Which bar is the tallest?",
        "How many shapes are there?",
        f"What {word} is the {rng.choice(THINGS)}?",
        "Which way does it move?",
        "What is different?",
        "What is in this image?",
    )


def too_hard_question(rng: Random) -> str:
    verb, matter, place, thing = rng.choice(VERBS), rng.choice(MATTERS), rng.choice(PLACES), rng.choice(THINGS)
    a, b = rng.randrange(100), rng.randrange(100)
    return any_of(
        rng,
        f"{verb.capitalize()} {matter}.",
        f"Can you {verb} {matter}?",
        f"Please {verb} {matter} for me.",
        f"What is the capital of {place}?",
        f"How far is it to {place}?",
        f"What is {a} + {b}?",
        f"What is {a} times {b}?",
        f"Why does a {thing} exist?",
        f"How do I buy a {thing}?",
        f"Tell me a story about a {thing}.",
        f"Who invented the {thing}?",
        f"What is the meaning of {any_of(rng, 'life', 'love', 'time', 'art', 'work')}?",
        f"Write a poem about a {thing}.",
        f"When was {place} founded?",
        f"How is the weather in {place}?",
        "What time is it?",
        "What day is it today?",
        "Tell me a joke.",
        f"{verb.capitalize()} me {matter}.",
        f"{verb} me {matter}",
        f"Tell me about {matter}.",
        f"Tell me about {place}.",
        f"{a}+{b}?",
        f"What is {a} * {b}?",
        f"Who is the president of {place}?",
        f"What do you think about {matter}?",
        f"How do I {verb} {matter}?",
        f"Where can I {verb} a {thing}?",
    )
