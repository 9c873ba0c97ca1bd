"""Defines what the handbook is about: kinds of things, their facts, and questions about them.

`{name}` is chosen at random for each thing, `{value}` for each fact. Sentences are plain, so that a
small model can read them, and values cannot be guessed.
"""

from dataclasses import dataclass

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple", "grey", "brown")
MATERIALS = ("oak", "granite", "copper", "glass", "brick", "slate", "bamboo", "marble", "steel")
FOODS = ("lentil soup", "plum cake", "fried fish", "barley bread", "goat cheese", "onion pie",
         "apple tart", "bean stew", "smoked eel", "rye pancakes")  # fmt: skip
ANIMALS = ("geese", "otters", "owls", "hares", "bees", "goats", "swans", "foxes", "herons", "bats")


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement, two ways to ask for its value, and the possible values.

    `values` are words, or the range of a number, without its end.
    """

    statement: str
    question: str
    paraphrase: str
    values: tuple[str, ...] | range


@dataclass(frozen=True, slots=True)
class ThingKind:
    """A kind of thing, with the facts that each has."""

    noun: str
    facts: tuple[Fact, ...]


KINDS = (
    ThingKind("ferry", (
        Fact("The {name} ferry leaves from pier {value}.",
             "From which pier does the {name} ferry leave?",
             "At which pier do I board the boat called {name}?", range(11, 98)),
        Fact("The {name} ferry goes every {value} minutes.",
             "How often does the {name} ferry go?",
             "How many minutes pass between two trips of the boat called {name}?", range(13, 97)),
        Fact("On the {name} ferry a ticket costs {value} crowns.",
             "How much does a ticket for the {name} ferry cost?",
             "What do I pay to travel with the boat called {name}?", range(11, 90)),
    )),
    ThingKind("museum", (
        Fact("The {name} museum is closed on {value}.",
             "On which day is the {name} museum closed?",
             "When can nobody visit the museum named {name}?", WEEKDAYS),
        Fact("The {name} museum has {value} rooms.",
             "How many rooms does the {name} museum have?",
             "What is the number of rooms in the museum named {name}?", range(21, 99)),
        Fact("The roof of the {name} museum is made of {value}.",
             "What is the roof of the {name} museum made of?",
             "Which material covers the museum named {name}?", MATERIALS),
    )),
    ThingKind("bridge", (
        Fact("The {name} bridge is {value} metres long.",
             "How long is the {name} bridge?",
             "How many metres is it to walk across {name}?", range(111, 990)),
        Fact("The {name} bridge is painted {value}.",
             "What colour is the {name} bridge?",
             "In which colour did they paint the bridge of {name}?", COLOURS),
        Fact("The {name} bridge was built in {value}.",
             "When was the {name} bridge built?",
             "In which year did they put up the bridge of {name}?", range(1611, 1990)),
    )),
    ThingKind("tavern", (
        Fact("The {name} tavern is known for its {value}.",
             "What is the {name} tavern known for?",
             "Which dish should I order at the inn {name}?", FOODS),
        Fact("The {name} tavern opens at {value} minutes past noon.",
             "How many minutes past noon does the {name} tavern open?",
             "How long after noon must I wait for the inn {name}?", range(11, 59)),
        Fact("The {name} tavern has a {value} door.",
             "What colour is the door of the {name} tavern?",
             "How do I know the entrance of the inn {name} by its colour?", COLOURS),
    )),
    ThingKind("garden", (
        Fact("The {name} garden is home to {value}.",
             "Which animals live in the {name} garden?",
             "What creatures can I watch in the park {name}?", ANIMALS),
        Fact("The {name} garden has {value} benches.",
             "How many benches does the {name} garden have?",
             "What number of seats stands in the park {name}?", range(21, 190)),
        Fact("The paths of the {name} garden are laid with {value}.",
             "What are the paths of the {name} garden laid with?",
             "On which material do I walk in the park {name}?", MATERIALS),
    )),
    ThingKind("pump", (
        Fact("The {name} pump is filled with {value} litres of oil.",
             "With how many litres of oil is the {name} pump filled?",
             "How much oil goes into the machine {name}?", range(11, 280)),
        Fact("The {name} pump is serviced on {value}.",
             "On which day is the {name} pump serviced?",
             "When does the mechanic look at the machine {name}?", WEEKDAYS),
        Fact("The warning lamp of the {name} pump is {value}.",
             "What colour is the warning lamp of the {name} pump?",
             "Which light shows that the machine {name} has a fault?", COLOURS),
    )),
)  # fmt: skip
