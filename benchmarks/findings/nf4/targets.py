"""NF4 is in no package that every machine has."""

TARGETS = ()
