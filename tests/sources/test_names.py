"""One word has one meaning: no two modules have a public type of one name, and no name says nothing.

`docs/glossary.md` is the arbiter: a word that it explains may be the name of several types, as the word means
the same everywhere. The lists below are of today's exceptions. They may only shrink.
"""

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / ".ci").exists())
sys.path.insert(0, str(ROOT / ".ci"))

import floors  # noqa: E402

# Names that say nothing of what a type is.
EMPTY = {"Known", "Place", "Said", "Told", "Use", "Way"}
# Types that still have such a name, by crate and module.
STILL_EMPTY = """
"""
# Names of public types in several modules, which the glossary does not explain.
SEVERAL_MEANINGS = """
"""


@cache
def types() -> list[tuple[str, str, bool]]:
    """Every type of the crates: crate and module, name, and whether other modules see it."""
    modules = [(crate.name, module) for crate in floors.crates(ROOT) for module in crate.modules()]
    return [
        (f"{crate} {'/'.join(module.path)}", found.name, found.public)
        for crate, module in modules
        for found in module.types.values()
    ]


def explained(glossary: str) -> set[str]:
    """The words of the glossary as types would be called."""
    words = re.findall(r"\*\*([^*]+)\*\*|\*([^*]+)\*:", glossary)
    forms = [form for both in words for word in both for form in re.split(r"[()]", word)]
    return {"".join(part.capitalize() for part in form.split()) for form in forms if form.strip()}


def test_words_of_the_glossary_are_names():
    glossary = (
        "**match key** one · **operation (op)** two · *shared segment*: three · **slab** that *follows*"
    )
    assert explained(glossary) == {"MatchKey", "Operation", "Op", "SharedSegment", "Slab"}


def test_a_public_type_stands_in_one_module_or_in_the_glossary():
    modules = defaultdict(set)
    for module, name, is_public in types():
        if is_public:
            modules[name].add(module)
    several = {name for name, found in modules.items() if len(found) > 1}
    several -= explained((ROOT / "docs/glossary.md").read_text())
    excepted = set(SEVERAL_MEANINGS.split())
    new = {name: sorted(modules[name]) for name in sorted(several - excepted)}
    assert not new, f"types of one name: {new}"
    assert not excepted - several, f"exceptions that are no longer needed: {excepted - several}"


def test_names_of_types_say_something():
    found = {f"{module} {name}" for module, name, _ in types() if name in EMPTY}
    excepted = {line.strip() for line in STILL_EMPTY.strip().splitlines()}
    assert not found - excepted, f"types with names that say nothing: {sorted(found - excepted)}"
    assert not excepted - found, f"exceptions that are no longer needed: {sorted(excepted - found)}"
