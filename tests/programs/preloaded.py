"""This module imports what the programs import, for a launcher that imports once and forks."""

from .case import FAMILIES, programs_of

for _family in FAMILIES:
    programs_of(_family)
