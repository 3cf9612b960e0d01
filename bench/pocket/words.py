"""The words that the training text is made of: all written for this project. Computes nothing."""

from __future__ import annotations


def split(text: str, separator: str | None = None) -> tuple[str, ...]:
    """What a written list holds; its parts stand between spaces, or between separators."""
    return tuple(part.strip() for part in text.split(separator) if part.strip())


NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")

CATEGORIES: dict[str, str] = {
    "fruits": "apple banana cherry grape lemon mango",
    "colours": "red blue green yellow orange purple",
    "animals": "cat dog horse cow sheep goat",
    "birds": "robin crow owl swan eagle heron",
    "trees": "oak pine birch maple willow elm",
    "flowers": "rose tulip daisy lily poppy violet",
    "vegetables": "carrot potato onion pea bean leek",
    "tools": "hammer saw drill chisel wrench file",
    "instruments": "piano violin flute drum harp trumpet",
    "metals": "iron copper gold silver tin zinc",
    "drinks": "water tea coffee milk juice cocoa",
    "sports": "tennis football hockey rowing running judo",
    "fish": "salmon trout cod tuna herring pike",
    "insects": "ant bee wasp moth beetle fly",
    "rooms": "kitchen bedroom hall attic cellar study",
    "vehicles": "car bus train bicycle boat tram",
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = split(
    "January February March April May June July August September October November December"
)

NAMES = split("Ada Ben Clara David Emma Felix Grace Hugo Ida Jonas Kira Leo Mia Noah Olga Paul")
CITIES = split("Berlin Paris Rome Oslo Madrid Vienna Lisbon Athens")

NOUNS = split("""
anchor animal answer apple apron arrow autumn badge bag ball banana band bank barn basket beach bear
bed bell belt bench berry bicycle bird blanket board boat bone book boot bottle bowl box branch
bread brick bridge broom brush bucket button cabin cable cake camel camera candle candy canoe card
carpet carrot castle ceiling chain chair cheese cherry chicken chimney circle clock cloth cloud coat
coin comb compass cookie corner cotton cover cow cradle crayon cream cricket crown cup curtain desk
diamond dinner dish doctor dog dolphin donkey door dragon drawer dream dress duck dust eagle ear
earth egg elbow engine envelope evening eye face farmer feather fence finger fire fish flag flame
floor flower fog forest fork fountain fox frame friend frog fruit garage garden garlic gate ghost
giant ginger glass glove glue goat goose grape grass guitar hair hammer hand harbor hat helmet
hen hill honey hook horn horse hotel house ice insect island jacket jar jelly jewel journey jungle
kettle key kitchen kite kitten knee knife ladder lake lamp leaf leather lemon letter library light
lion lizard lunch machine magnet mail map marble market mask meadow medal melon mirror money monkey
moon morning mountain mouse mouth mud museum music nail napkin neck needle nest net night nose
notebook number nut ocean office oil olive onion orange oven owl paint palace pan paper parcel
parrot path peach pear pen pencil penguin pepper person picture pig pigeon pillow pilot pizza plane
planet plant plate pocket pond pony potato pumpkin puppy puzzle queen rabbit radio rain rainbow
ribbon ring river road robot rocket roof room root rope rose sailor salad salt sand sandwich school
scissors sea seal seed shadow shark sheep shell ship shirt shoe shop shovel shower silver sister
skirt sky snail snake snow soap sock sofa soup spider spoon spring square squirrel stable stamp star
station stone storm stove street student sugar summer sun swan sweater table tail tailor teacher
tent thumb thunder ticket tiger toast tomato tooth towel tower town toy train tree triangle truck
tulip tunnel turtle uncle valley vase village violin voice wagon wall wallet water wave weather
whale wheat wheel whistle window winter wolf wood wool worm yard zebra
""")

JSON_FIELDS: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "city": CITIES,
    "colour": split(CATEGORIES["colours"]),
    "pet": split(CATEGORIES["animals"]),
    "fruit": split(CATEGORIES["fruits"]),
    "day": DAYS,
    "age": tuple(map(str, range(1, 100))),
    "count": tuple(map(str, range(1, 100))),
    "price": tuple(map(str, range(1, 100))),
    "floor": tuple(map(str, range(1, 30))),
}

FUNCTION_NAMES = split(
    "change shift adjust compute apply update convert run step work move score scale get_value"
)

HEROES = split(
    "fox bear rabbit dragon robot farmer sailor queen mouse owl wizard painter child giant cat"
)
MOODS = split("small brave tired clever shy happy lonely curious gentle proud old quiet")
PLACES = split(
    "in a green forest;by the sea;on a high hill;near an old mill;in a busy town;"
    "under a bridge;in a quiet valley;on a far island;behind the garden;at the edge of a lake",
    ";",
)
TREASURES = split(
    "golden key;red ball;broken clock;strange map;silver coin;warm coat;little boat;"
    "box of paint;old book;shiny stone;lost letter;wooden flute",
    ";",
)
SCENES = split(
    "garden;kitchen;forest;harbor;market;library;winter morning;river;farm;old house", ";"
)
SCENE_MOODS = split("calm strange cheerful lonely busy peaceful dark noisy")
