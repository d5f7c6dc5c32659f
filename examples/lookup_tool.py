"""A tool of one's own: a function with a docstring and named parameters. The model is shown both.

hpc-grpo train CONFIG environment='{name: tools, args: {tools: [calculator, examples/lookup_tool.py:population]}}'
"""

PEOPLE = {"Oslo": 717_710, "Quito": 1_763_275, "Perth": 2_309_338}


def population(city: str) -> int:
    """Return how many people live in a city.

    Args:
        city: The name of the city, in English.
    """
    if city not in PEOPLE:
        raise ValueError(f"no such city; there are {', '.join(PEOPLE)}")  # the model reads this, and can ask again
    return PEOPLE[city]
