"""The colours of the run page, as colour-blind readers see them."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stretto.report import page

Colour = npt.NDArray[np.float64]

# Machado, Oliveira and Fernandes 2009, of full severity, on linear sRGB.
SEEN = {
    "by all": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = XYZ.sum(axis=1)
LEAST_DISTANCE = 11
"""In CIE L*a*b* of 1976; 2.3 is just noticed. Of the page's first palette, pairs had 3 and 5."""
LEAST_CONTRAST = 3
"""Of graphics, in WCAG 2.1."""


def linear(text: str) -> Colour:
    """Return a colour such as `#0072b2` in linear sRGB."""
    digits = text * 2 if len(text) == 3 else text
    values = np.array([int(digits[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour: Colour) -> Colour:
    scaled = XYZ @ np.clip(colour, 0, 1) / WHITE
    f = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def themes() -> dict[str, dict[str, Colour]]:
    text = (Path(page.__file__).parent / "page.css").read_text()
    blocks = re.findall(r":root.*?\{(.*?)\}", text, re.DOTALL)
    return {
        name: {key: linear(value) for key, value in re.findall(r"--(\w+): #(\w+);", block)}
        for name, block in zip(("light", "dark"), blocks[:2], strict=True)
    }


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_can_be_told_apart(theme: str, eye: str) -> None:
    found = themes()[theme]
    lines = {name: lab(SEEN[eye] @ found[name]) for name in found if re.fullmatch(r"c\d", name)}
    assert len(lines) == 9
    distances = {
        (one, other): float(np.linalg.norm(lines[one] - lines[other]))
        for one, other in combinations(lines, 2)
    }
    assert {k: v for k, v in distances.items() if v < LEAST_DISTANCE} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_and_texts_are_seen_on_their_ground(theme: str) -> None:
    found = themes()[theme]
    light = {name: float(XYZ[1] @ colour) for name, colour in found.items()}
    for ground in ("back", "raised"):
        contrasts = {
            name: (max(light[name], light[ground]) + 0.05)
            / (min(light[name], light[ground]) + 0.05)
            for name in light
            if re.fullmatch(r"c\d|ink|soft|warn|good", name)
        }
        assert {k: v for k, v in contrasts.items() if v < LEAST_CONTRAST} == {}
        assert all(contrasts[name] >= 4.5 for name in ("ink", "soft", "warn", "good"))
