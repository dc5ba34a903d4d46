"""The look of figures: people with a colour vision deficiency can read them, and one module owns it."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import ringmaster_dist
from ringmaster_dist.observe import style

PACKAGE = Path(ringmaster_dist.__file__).parent
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                        [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                        [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """The colour in CIELAB, as seen."""
    srgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(vision @ linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_apart(vision, shade):
    """A difference of 2.3 is just noticeable. Areas have their colour only, and lines have dashes too."""
    for colours, least in ((style.KINDS.values(), 20), (style.LINES, 10)):
        for one, other in itertools.combinations([pair[shade] for pair in colours], 2):
            assert np.linalg.norm(lab(one, VISION[vision]) - lab(other, VISION[vision])) > least, (one, other)


def test_no_two_lines_look_the_same():
    assert len(set(style.DASHES)) == len(style.LINES) == len(style.DASHES)
    looks = [style.line(place) for place in range(len(style.LINES) ** 2)]
    assert len(set(looks)) == len(looks)


def test_no_other_module_names_a_colour():
    named = re.compile(r"#[0-9a-fA-F]{6}\b")
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".js") and path.name != "style.py"]
    assert len(sources) > 100
    assert [path.name for path in sources if named.search(path.read_text())] == []


def test_the_drawing_style_ends_with_its_figure(tmp_path):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with style.drawing():
        figure = style.figure(4, 3)
        axis = figure.subplots()
        for place in range(3):
            axis.plot([0, 1], [place, 1], color=f"C{place}", label=str(place))
        style.legend_below(axis)
        style.save(figure, [tmp_path / "a.png", tmp_path / "a.pdf"])
        sizes = {text.get_fontsize() for text in axis.get_legend().get_texts()}
    assert dict(mpl.rcParams) == before
    assert [drawn.get_color() for drawn in axis.lines] == ["C0", "C1", "C2"]
    assert len({drawn._unscaled_dash_pattern for drawn in axis.lines}) == 3
    assert sizes == {style.LEGEND_POINTS}
