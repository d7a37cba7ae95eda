"""Colours that people with any kind of colour vision can tell apart: the palette of Okabe and Ito.

https://jfly.uni-koeln.de/color/
"""

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"

GOOD, WARNING, BAD = BLUE, ORANGE, VERMILLION

BY_SOURCE = {"^nvml$": BLUE, "^procfs$": ORANGE, "^kubelet$": GREEN, "^kubernetes$": PURPLE}
BY_RESOURCE = {"^memory ": BLUE, "^compute ": ORANGE, "^unallocated ": VERMILLION}

# Grafana has no palette of this kind for series whose names nobody knows beforehand. A pod gets its colour by its name's last character,
# of those that Kubernetes makes names end in, so that it keeps its colour on every board. Vermillion is kept for what is wrong.
BY_LAST_CHARACTER = {
    "[05bcx]": BLUE,
    "[16dfgy]": ORANGE,
    "[27hjkal]": GREEN,
    "[38mnoe]": PURPLE,
    "[49pqriz]": SKY,
    "[stuvw]": YELLOW,
}
