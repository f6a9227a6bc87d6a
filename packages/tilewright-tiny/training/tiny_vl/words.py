"""Words that images show and questions name."""

from __future__ import annotations

from random import Random

from training.tiny_vl.lesson import listed

# Things that no image of ours shows: whoever asks about them is told so.
THINGS = listed("""
    cat dog bird horse cow car bus bicycle tree flower house door window man woman child person boat plane cup
    book chair table phone hat shoe fish apple banana cloud moon sun river mountain road train lamp clock key
    shirt bag ball bottle bridge camera guitar kite ladder mouse orange pizza rabbit robot sheep snake spoon
    tiger umbrella wheel arrow oval ring face hand leaf fence flag kitchen garden beach elephant laptop keyboard
""")
WORDS = listed("""
    able acid album alert alpha amber anchor angle apple april arrow atlas autumn bakery balance banana basket
    beach berry bird black blue board boat book border bottle bread bridge bright brown brush button cabin cafe
    camera candle canvas carpet castle cedar centre chair change cheese cherry circle city clay clock closed
    cloud coast coffee colour copper coral corner cotton cream crown danger dark data delta desert design door
    double dragon dream drive eagle early earth east echo eight engine enter entry event exit fabric family farm
    fast field fire fish flame flash floor flower flute focus forest fox frame free fresh friday frost fruit
    future garden gate ghost giant glass globe gold grain grape grass gravel green grey guitar hammer happy
    harbour harvest hello help hidden hill honey horse hotel house human ice idea index indigo iron island ivory
    jacket january jazz jelly jungle juice june kettle key king kitchen kite ladder lake lamp large laser lemon
    letter level light lime lion local lucky lunar magic magnet mango maple marble march market matrix meadow
    melon menu metal middle milk mint mirror mobile model moment monday monkey moon morning motor mouse museum
    music narrow nature needle nine noble north note novel number oak ocean office olive open orange orbit
    orchid oxygen packet paint palace panda paper parade park peach pearl pencil pepper phone piano picture
    pilot pine pink pixel planet plant plate plaza pocket poem police pony press price prince print prize public
    pump purple puzzle quartz queen quick quiet rabbit radar radio rain random rapid raven record red river road
    robot rocket room rose round royal ruby safety sail salad salt sand saturn scale school sea season second
    sheep shell ship shoe shop signal silk silver simple sister six sky small smoke snow soap solar sound south
    space spark spice spoon spring square stamp star start station steam steel stone stop storm street sugar
    summer sun sunday swan table tango taxi tea temple ten tennis thunder ticket tiger tile timber today tower
    toy track train travel tree tulip tunnel turtle twelve under union unit urban valley vanilla velvet vessel
    video view village violet vision vivid volcano voyage walnut warm water wave west whale wheat wheel white
    wild willow wind window winter wizard wolf wood world yard yellow young zebra zero zone
""")
# What stands below bars: letters that are not easily taken for one another, and words that fit there.
LETTERS = tuple("ABCDEFGHKLMNPRSTXYZ")
SHORT_WORDS = listed("""
    tea milk rice corn oats figs nuts beans plums pears eggs salt Mon Tue Wed Thu Fri Sat Sun Jan Feb Mar Apr
    May Jun Jul Aug Sep Oct Nov Dec Ann Bob Cat Dan Eve Ian Kim Leo Mia Tom cats dogs cows pigs hens bees
""")
ONSETS = listed("""
    b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr pl pr sh sl sp st th tr
""")
VOWELS = listed("""
    a e i o u ai ea ee oa oo ou
""")
ENDS = ("", "", "n", "r", "s", "t", "l", "m", "ck", "nd", "st", "rt", "ng", "x", "y")
LONGEST = 8  # characters that are read
# Without the letters and digits that look like each other: a string without meaning leaves nothing to tell them by.
PLAIN_CHARACTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def made_up_word(rng: Random) -> str:
    word = ""
    for _ in range(rng.choice((1, 2, 2, 3))):
        word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDS)
    return word[:LONGEST]


def random_text(rng: Random) -> str:
    """A word, a made-up word, a number or a string without meaning, of at most `LONGEST` characters."""
    way = rng.random()
    if way < 0.25:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    if way < 0.42:
        return "".join(rng.choice(PLAIN_CHARACTERS) for _ in range(rng.randint(1, LONGEST)))
    word = rng.choice(WORDS) if way < 0.65 else made_up_word(rng)
    case = rng.random()
    return word.upper() if case < 0.45 else word.capitalize() if case < 0.75 else word


def is_number(text: str) -> bool:
    return text.isdigit()
