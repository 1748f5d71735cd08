"""All programs."""

from . import children, ends, forms, state
from .program import Program

PROGRAMS = {
    **{name: Program(text) for module in (ends, state, children) for name, text in module.TEXTS.items()},
    **state.OTHERS,
    **forms.OTHERS,
}
