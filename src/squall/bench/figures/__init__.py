"""One file for each figure: its first line says what is measured, `measure(settings, place) -> Report` measures it."""
