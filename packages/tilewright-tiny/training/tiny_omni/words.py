"""The words that are spoken, and the small world that questions are about. No two words sound alike."""

from __future__ import annotations

from training.tiny_vl.lesson import listed

DIGITS = listed("zero one two three four five six seven eight nine")
TEENS = listed("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = listed("twenty thirty forty fifty sixty seventy eighty ninety")
COLOURS = listed("red green blue yellow orange purple pink brown black white grey")
SHAPES = listed("circle square triangle star heart diamond oval cross arrow line")
SIZES = listed("small big tiny large")
ANIMALS = listed("cat dog cow horse sheep pig duck lion tiger monkey rabbit mouse snake frog spider fish bird goat")
FOODS = listed("apple banana lemon cherry carrot potato tomato onion bread cheese butter milk sugar coffee pizza soup")
THINGS = listed(
    "table chair window door lamp bottle cup plate spoon knife fork book pencil paper bag box clock phone camera radio "
    "mirror carpet blanket pillow hammer ladder bucket basket button candle ticket letter ball doll drum guitar piano "
    "ring coin key"
)
PLACES = listed(
    "house garden kitchen school office station market church bridge castle forest river mountain island beach village "
    "city street farm hotel library museum park shop"
)
NATURE = listed("sun moon cloud rain snow wind storm fire water stone sand grass tree leaf flower rock sky ice")
PEOPLE = listed("man woman baby child doctor teacher farmer driver baker sailor king queen friend mother father")
BODY = listed("hand foot arm leg finger nose mouth ear tooth head neck back knee shoulder")
VEHICLES = listed("car bus train truck boat ship bicycle tractor rocket taxi")
CLOTHES = listed("shirt hat coat shoe sock dress jacket glove scarf belt")
VERBS = listed(
    "walk run jump swim sing dance sleep drink open close push pull throw catch climb wash cook paint build travel "
    "listen answer follow carry"
)
QUALITIES = listed(
    "happy sad hot cold new old fast slow long short young empty full clean dirty hard soft heavy light quiet loud "
    "dark bright rich poor strong weak early late easy difficult"
)
DAYS = listed("monday tuesday wednesday thursday friday saturday sunday")
MONTHS = listed("january february march april may june july august september october november december")
OTHERS = listed("music summer winter morning evening yellow number paper picture story game holiday birthday secret")

VOCABULARY = tuple(
    dict.fromkeys(
        word
        for group in (
            *(DIGITS, TEENS, COLOURS, SHAPES, ANIMALS, FOODS, THINGS, PLACES, NATURE, PEOPLE, BODY, VEHICLES, CLOTHES),
            *(VERBS, QUALITIES, DAYS, MONTHS, OTHERS),
        )
        for word in group
    )
)
# What a listener who does not know what to expect takes for something else, as the voice says it.
UNCLEAR = frozenset(
    listed(
        "ring lion frog fish pull lamp carrot weak candle doctor hat full bottle line purple belt train ladder mouth "
        "sand plate shoe coin cloud snow rich difficult street hammer house coat arrow blanket build happy bag doll "
        "sad ticket carry two dance strong late cheese bicycle grey holiday island glove basket sheep oval light tree "
        "knee truck moon nose poor carpet blue ear dog cow ball king triangle january rabbit climb hand push clock "
        "picture cold cat sock kitchen throw red cross horse leaf february loud tiger tooth sugar monkey "
        "sun queen finger shop box leg hot beach mouse morning key old twelve heart head brown close april forest "
        "duck foot eight ice soup game clean dirty quiet"
    )
)
REPEATED = tuple(word for word in VOCABULARY if word not in UNCLEAR)
DRAWN = {
    "sizes": SIZES,
    "colours": tuple(colour for colour in COLOURS if colour != "orange"),
    "shapes": listed("circle square star heart diamond line"),
}
SPELLED = listed(
    "cat dog cow pig duck lion frog fish bird apple milk door lamp cup book bag box ball sun moon tree car"
)

OPPOSITES = {
    "hot": "cold", "new": "old", "fast": "slow", "long": "short", "empty": "full", "clean": "dirty", "hard": "soft",
    "heavy": "light", "quiet": "loud", "dark": "bright", "rich": "poor", "strong": "weak", "early": "late",
    "easy": "difficult", "happy": "sad", "big": "small", "black": "white", "day": "night", "up": "down",
}  # fmt: skip
SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "lion": "roar"}
LEGS = {"spider": "eight", "dog": "four", "horse": "four", "duck": "two", "snake": "zero", "bird": "two", "cat": "four"}
COLOUR_OF = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red", "a lemon": "yellow",
    "a carrot": "orange", "coffee": "brown", "milk": "white", "a cherry": "red",
}  # fmt: skip
KIND_OF = {
    "animal": ANIMALS, "colour": COLOURS, "shape": SHAPES, "day": DAYS, "month": MONTHS, "vehicle": VEHICLES,
}  # fmt: skip
COUNTED = ("animal", "shape", "vehicle")  # the kinds of things of which there are several: the cat, but red and monday
# What a thing is told to do, and how it is then.
SWITCHED = {"light": ("on", "off"), "radio": ("on", "off"), "camera": ("on", "off"), "lamp": ("on", "off")}
OPENED = listed("door window box bag bottle book")


def number_words(number: int, joint: str = "and") -> str:
    """0 to 999 as it is said: three hundred and forty two."""
    if number < 10:
        return DIGITS[number]
    if number < 20:
        return TEENS[number - 10]
    if number < 100:
        tens, rest = divmod(number, 10)
        return f"{TENS[tens - 2]} {DIGITS[rest]}" if rest else TENS[tens - 2]
    hundreds, rest = divmod(number, 100)
    words = f"{DIGITS[hundreds]} hundred"
    return f"{words} {joint} {number_words(rest)}".replace("  ", " ") if rest else words
