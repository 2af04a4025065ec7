"""The run page in a real browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.report.page import payloads

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")

from tests.report.page.browsing import LiveServer, Seen, browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow  # a browser is started

NONE = "\N{EN DASH}"
UNITS = ["ba", "sp", "tok", "ep", "dur", "sec", "utc"]
HOSTILE = "</script><img src=x onerror=\"alert('in')\"><!-- ${1} {{DATA}} /*SCRIPT*/ ' \" \u2028 名"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def seen(chromium: Browser) -> Iterator[Seen]:
    opened = Seen(chromium, viewport={"width": 1280, "height": 900})
    yield opened
    opened.page.close()
    assert opened.complaints == []


def view(page: Page) -> list[float]:
    found: list[float] = page.evaluate("strettoPage.view()")
    return found


def zoom(page: Page) -> Any:
    return page.evaluate("strettoPage.state.zoom")


def choose(seen: Seen, unit: str) -> None:
    seen.page.locator(f"#axis label:has([value={unit}])").click()
    seen.frames()


def columns(record: dict[str, Any]) -> dict[str, Any]:
    texts = {unit: record["clock"][unit] for unit in UNITS}
    return {unit: np.frombuffer(base64.b64decode(text), "<f8") for unit, text in texts.items()}


def test_no_request_leaves_the_page(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path)
    for unit in UNITS:
        choose(seen, unit)
    page.evaluate("fetch('https://example.org/').catch(() => {})")
    page.wait_for_timeout(100)
    refused = [text for text in seen.complaints if "example.org" in text]
    assert refused, "the page may ask for other addresses"
    seen.complaints.clear()
    assert [url for url in seen.requests if not url.startswith("data:")] == [
        (tmp_path / "page.html").as_uri()
    ]


def test_a_round_through_all_axes_keeps_the_zoom_exactly(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path, "#axis=sp")
    # The end lies beyond the first run, which has the rows that the zoom is kept in.
    page.evaluate("strettoPage.zoomTo(3210.7, 44321.9)")
    seen.frames()
    before = view(page), zoom(page)
    views = []
    for unit in [*UNITS, "sp"]:
        choose(seen, unit)
        views.append(view(page))
    assert (view(page), zoom(page)) == before
    assert len({tuple(found) for found in views}) == len(UNITS)
    assert view(page) == pytest.approx([3210.7, 44321.9], rel=1e-12)


def test_the_axis_shows_the_clock_of_the_rows(seen: Seen, tmp_path: Path) -> None:
    record = payloads.run("a")
    page = seen.show(payloads.payload(record), tmp_path)
    page.evaluate("strettoPage.zoomTo(100.25, 612.75)")
    seen.frames()
    rows = zoom(page)["from"], zoom(page)["to"]
    for unit, column in columns(record).items():
        choose(seen, unit)
        assert view(page) == pytest.approx(
            list(np.interp(rows, np.arange(column.size), column)), rel=1e-12
        )


def test_a_reload_shows_the_same_view(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path, "#axis=tok")
    page.evaluate("strettoPage.zoomTo(1e5, 2e6)")
    before = view(page)
    seen.frames()
    before = view(page)
    page.reload()
    seen.frames()
    assert view(page) == before


def test_dragging_zooms_every_panel_and_a_double_click_ends_it(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path, "#axis=sp")
    whole = view(page)
    box = page.locator(".panel .u-over").nth(1).bounding_box()
    assert box is not None
    y = box["y"] + 50
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, y, steps=4)
    page.mouse.up()
    seen.frames()
    width = whole[1] - whole[0]
    wanted = [whole[0] + width / 4, whole[0] + width * 3 / 4]
    assert view(page) == pytest.approx(wanted, abs=width / box["width"] * 2)
    scales = page.evaluate("strettoPage.panels.map(p => [p.u.scales.x.min, p.u.scales.x.max])")
    assert len(scales) == 8
    assert all(scale == view(page) for scale in scales)
    page.mouse.dblclick(box["x"] + 100, y)
    seen.frames()
    assert view(page) == whole


def test_the_legend_hides_a_run_and_keeps_the_zoom(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path, "#axis=sp")
    page.evaluate("strettoPage.zoomTo(1000, 30000)")
    seen.frames()
    before = view(page)
    button = page.locator("#legend button").first
    button.click()
    seen.frames()
    names = page.evaluate("[...new Set(strettoPage.panels[0].traces.map(t => t.run.name))]")
    assert names == ["noise", "runs/longer"]
    assert button.get_attribute("aria-pressed") == "false"
    assert view(page) == before
    button.click()
    seen.frames()
    assert view(page) == before
    assert page.evaluate("strettoPage.panels[0].traces.length") == 6


def test_a_step_out_of_view_keeps_its_level(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.payload(payloads.run("a")), tmp_path)
    page.evaluate("strettoPage.zoomTo(600, 700)")  # the size is 64 since batch 300
    seen.frames()
    low, high = page.evaluate("strettoPage.panels.find(p => p.key === 'batch_size').y")
    assert low < np.log2(64) < high
    values = page.locator(".panel:has-text('batch size') .values b").all_text_contents()
    assert values == ["64", "64"]


def test_other_metrics_are_shown_on_request(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path)
    assert page.locator(".panel").count() == 8
    page.get_by_text("Panels", exact=True).click()
    page.get_by_role("checkbox", name="eval/accuracy").check()
    page.get_by_role("checkbox", name="throughput").uncheck()
    seen.frames()
    titles = page.locator(".panel h2").all_text_contents()
    assert [title.strip() for title in titles] == [
        "loss",
        "batch size",
        "accumulation",
        "learning rate",
        "gradient norm",
        "noise scale",
        "memory",
        "eval/accuracy",
    ]


def test_the_axis_and_the_cursor_obey_the_keyboard(seen: Seen, tmp_path: Path) -> None:
    record = payloads.run("a", points=40)
    page = seen.show(payloads.payload(record), tmp_path)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("strettoPage.state.axis") == "sp"
    page.keyboard.press("ArrowLeft")
    page.locator(".panel").first.focus()
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    spoken = page.locator("#spoken").text_content() or ""
    batch = int(re.findall(r"(\d+) batches", spoken)[0])
    assert batch in columns(record)["ba"]
    loss = np.frombuffer(base64.b64decode(record["series"][0]["values"]), "<f4")
    at = np.frombuffer(base64.b64decode(record["series"][0]["rows"]), "<u4")
    index = int(np.searchsorted(columns(record)["ba"][at], batch))
    assert f"training {loss[index]:.4g}" in spoken
    whole = view(page)
    page.keyboard.press("+")
    seen.frames()
    assert view(page) != whole
    page.keyboard.press("0")
    seen.frames()
    assert view(page) == whole


def test_a_mark_says_what_happened_on_hover_and_focus(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.payload(payloads.run("a")), tmp_path)
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator(".lane button.grave").first.hover()
    assert "resume (attempt 2): from ba320" in (tip.text_content() or "")
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    page.locator(".lane button").first.focus()
    assert "started on 1 rank" in (tip.text_content() or "")
    page.keyboard.press("ArrowRight")
    assert "evaluation" in (tip.text_content() or "")


def test_the_theme_follows_the_system_until_it_is_chosen(chromium: Browser, tmp_path: Path) -> None:
    seen = Seen(chromium, color_scheme="dark")
    page = seen.show(payloads.three(), tmp_path)
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.locator("#theme").click()
    assert page.evaluate(theme) == "light"
    page.emulate_media(color_scheme="light")
    page.locator("#theme").click()
    page.reload()
    assert page.evaluate(theme) == "dark"
    page.close()


def test_a_phone_shows_the_page_without_sideways_scrolling_and_pinches(
    chromium: Browser, tmp_path: Path
) -> None:
    size = {"width": 390, "height": 844}
    seen = Seen(chromium, viewport=size, has_touch=True, is_mobile=True, device_scale_factor=2)
    page = seen.show(payloads.three(), tmp_path, "#axis=sp")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    over = page.locator(".panel .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    session = page.context.new_cdp_session(page)
    y, middle, whole = box["y"] + 40, box["x"] + box["width"] / 2, view(page)

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": x, "y": y, "id": i} for i, x in enumerate(xs)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", middle - 20, middle + 20)
    for apart in (30, 50, 80):
        touch("touchMove", middle - apart, middle + apart)
    touch("touchEnd")
    seen.frames()
    low, high = view(page)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 4, rel=0.1)
    assert low < (whole[0] + whole[1]) / 2 < high
    page.close()
    assert seen.complaints == []


def hostile() -> dict[str, Any]:
    record = payloads.run(HOSTILE, points=20)
    record["facts"].append([HOSTILE, HOSTILE])
    record["stages"]["columns"][0] = record["stages"]["rows"][0][0] = HOSTILE
    record["events"][1]["text"] = record["events"][2]["kind"] = HOSTILE
    record["series"][0]["label"] = record["series"][0]["name"] = HOSTILE
    record["series"][-1]["panel"] = HOSTILE
    return payloads.payload(record, payloads.run("b", points=20))


def one_point() -> dict[str, Any]:
    units = {unit: [1.0] for unit in UNITS}
    found = [
        payloads.series("loss", "loss", [0], [2.5]),
        payloads.series("batch_size", "batch_size", [0], [8], step=True),
        payloads.series("noise", "noise_scale", [0], [8], interval=([4], [16])),
    ]
    record = {"name": "a", "kind": "run", "clock": payloads.clock(units), "series": found}
    return payloads.payload({**record, "events": [], "stages": None, "facts": []})


def not_finite() -> dict[str, Any]:
    n, nan, rows = 9, np.nan, np.arange(9)
    units: dict[str, Any] = {unit: np.linspace(0, 1, n) for unit in UNITS}
    units |= {"tok": None, "sec": np.where(rows % 3, rows, nan), "ba": rows, "utc": 1e9 - rows}
    values = [nan, 3, np.inf, nan, 2, 1, -np.inf, 0, nan]
    found = [
        payloads.series("loss", "loss", rows, values),
        payloads.series("noise", "noise_scale", rows, values, interval=(values, [nan] * n)),
        payloads.series("all", "lr", rows, [nan] * n),
        payloads.series("size", "batch_size", [0, 4], [nan, 16], step=True),
    ]
    record = {"name": "a", "kind": "run", "clock": payloads.clock(units), "series": found}
    events = [payloads.event(3, "skipped_step", "loss is nan"), payloads.event(0, "unheard", "")]
    return payloads.payload({**record, "events": events, "stages": None, "facts": []})


def nothing() -> dict[str, Any]:
    empty = {"n": 0, **dict.fromkeys(UNITS)}
    return payloads.payload(
        {"name": "a", "kind": "run", "clock": empty, "series": [], "events": [], "facts": []}
    )


@pytest.mark.parametrize(
    "odd",
    [hostile, one_point, not_finite, nothing, payloads.payload, payloads.memory],
    ids=["hostile", "one-point", "nan", "no-rows", "no-runs", "memory"],
)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_odd_data_is_shown_without_complaint(
    chromium: Browser, tmp_path: Path, odd: Any, theme: Any
) -> None:
    seen = Seen(chromium, color_scheme=theme)
    page = seen.show(odd(), tmp_path)
    for label in page.locator("#axis label:visible").all():
        label.click()
        seen.frames()
        page.locator(".u-over").last.hover() if page.locator(".u-over").count() else None
    for mark in page.locator(".lane button").all()[:4]:
        mark.hover(force=True)
    for button in page.get_by_role("button", name="log", exact=True).all():
        button.click()
    seen.frames()
    assert page.locator("img, iframe").count() == 0
    page.close()
    assert seen.complaints == []


def test_hostile_names_are_shown_as_they_are(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(hostile(), tmp_path)
    assert page.locator("#legend button").first.text_content() == HOSTILE
    assert HOSTILE in (page.locator("#facts").text_content() or "")
    assert HOSTILE in (page.locator("#stages").text_content() or "")


def test_memory_is_stacked_below_the_limit(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.memory(), tmp_path)
    tops = page.evaluate("strettoPage.panels[0].traces.map(t => t.s.values[100] / 2 ** 30)")
    assert tops == pytest.approx([3, 3, 7, 7 + 5.5 * 100 / 180, 7 + 5.5 * 100 / 180])
    assert page.evaluate("strettoPage.panels[0].y[1] / 2 ** 30") > 16
    facts = page.locator("#facts").text_content() or ""
    assert "12.9 GiB" in facts
    assert "at least 0.2 s" in facts


def test_memory_without_a_cursor_is_that_of_the_peak(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.memory(), tmp_path)
    assert page.locator(".top small").text_content() == "at the peak"
    assert "activations 5.5 GiB" in (page.locator(".values").text_content() or "")
    assert page.locator("#stages h2").text_content() == "Largest at the peak"
    rows = page.locator(".largest").all_text_contents()
    assert rows == ["model.py:9 forward4.125 GiB", "model.py:7 forward1.375 GiB"]
    over = page.locator(".u-over").bounding_box()
    assert over
    page.mouse.move(over["x"] + over["width"] / 4, over["y"] + 20)
    seen.frames()
    assert "Largest at event" in (page.locator("#stages h2").text_content() or "")
    assert page.locator(".largest").all_text_contents() != rows


def test_a_slider_shows_another_step(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.memory(), tmp_path)
    slider = page.locator(".steps input")
    assert page.locator(".steps output").text_content() == "2 (peak)"
    top = "strettoPage.panels[0].traces.at(-1).s.values[100] / 2 ** 30"
    before = page.evaluate(top)
    slider.fill("0")
    seen.frames()
    assert page.locator(".steps output").text_content() == "1"
    assert page.evaluate(top) == pytest.approx(before - 4)
    assert seen.complaints == []


@pytest.mark.parametrize("width", [390, 1200])
def test_labels_of_memory_do_not_overlap(seen: Seen, tmp_path: Path, width: int) -> None:
    # What the page writes is recorded: the place and the width of each text.
    seen.page.add_init_script(
        """globalThis.texts = new Map();
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
          if (this.textAlign === "left" && /[a-z]{4}/.test(text))
            texts.set(text, [x, y, this.measureText(text).width]);
          return write.call(this, text, x, y);
        };"""
    )
    seen.page.set_viewport_size({"width": width, "height": 800})
    page = seen.show(payloads.memory(), tmp_path)
    seen.frames()
    found = page.evaluate("[...texts]")
    assert {text for text, _ in found} >= {"peak", "backward", "optimizer step"}
    edge = page.evaluate("innerWidth")
    for one, (x, y, length) in found:
        assert x >= 0
        assert x + length <= edge
        for other, (x2, y2, length2) in found:
            apart = abs(y - y2) >= 12 or x + length <= x2 or x2 + length2 <= x
            assert one == other or apart, (one, other)
    assert page.evaluate("document.documentElement.scrollWidth") <= edge


def test_a_million_batches_are_drawn_by_their_points(seen: Seen, tmp_path: Path) -> None:
    seen.page.add_init_script(
        """globalThis.drawn = 0;
        for (const name of ["lineTo", "moveTo", "arc"]) {
          const own = Path2D.prototype[name];
          Path2D.prototype[name] = function (...at) { drawn++; return own.apply(this, at); };
        }"""
    )
    sizes = (8, 16, 24, 32, 48, 64, 96, 128)
    big = payloads.run("big", 1_000_000, sizes=sizes, points=4_000)
    page = seen.show(payloads.payload(big), tmp_path)
    points = page.evaluate("strettoPage.panels.flatMap(p => p.traces).length") * 4_000
    for unit in UNITS[1:]:
        page.evaluate("drawn = 0")
        page.evaluate(f"document.querySelector('#axis [value={unit}]').click()")
        seen.frames()
        # A switch draws once; a point is at most two corners and two ends of its band.
        assert 0 < page.evaluate("drawn") < 4 * points


class TestLive:
    @pytest.fixture
    def server(self) -> Iterator[LiveServer]:
        started = LiveServer(payloads.payload(payloads.run("a", points=40), live=True))
        yield started
        started.close()

    def test_new_rows_keep_what_is_looked_at(self, server: LiveServer, seen: Seen) -> None:
        page = seen.go(server.address)
        page.evaluate("strettoPage.zoomTo(100, 300)")
        seen.frames()
        before = view(page)
        page.locator("#legend button").focus()
        n = page.evaluate("strettoPage.runs[0].n")
        server.changed.append(payloads.run("a", points=80))
        seen.until(f"strettoPage.runs[0].n > {n}")
        assert view(page) == pytest.approx(before, rel=1e-12)
        assert page.evaluate("document.activeElement.parentElement.id") == "legend"
        assert page.locator("#live").text_content() == "live"
        page.keyboard.press("Enter")
        assert page.locator("#legend button").get_attribute("aria-pressed") == "false"
        assert not page.evaluate("strettoPage.runs[0].shown")
        asked = {url.partition("?")[0] for url in seen.requests if not url.startswith("data:")}
        assert asked == {server.address, server.address + "runs"}

    def test_a_run_sent_again_replaces_its_rows_and_keeps_the_view(
        self, server: LiveServer, seen: Seen
    ) -> None:
        page = seen.go(server.address)
        page.evaluate("strettoPage.zoomTo(100, 300)")
        seen.frames()
        before = view(page)
        server.changed.append(payloads.run("a", points=30))
        server.changed.append(payloads.run("b", points=30))
        seen.until("strettoPage.runs.length === 2")
        assert view(page) == pytest.approx(before, rel=1e-12)
        assert page.locator("#legend button").all_text_contents() == ["a", "b"]


def test_an_axis_and_the_log_button_pressed_in_one_frame_do_not_hang(
    seen: Seen, tmp_path: Path
) -> None:
    """The labels of one state were counted on the axis of the other: 1e9 is no power of two."""
    page = seen.show(payloads.three(), tmp_path)
    page.evaluate(
        """() => {
            for (const run of strettoPage.runs) for (const s of run.series) if (s.panel === "loss")
                s.values = Float64Array.from(s.values, v => v * 1e9);
            for (const unit of ["sp", "ba", "sp"]) {
                strettoPage.setAxis(unit);
                document.querySelectorAll(".panel .top button").forEach(one => one.click());
            }
        }"""
    )
    seen.frames()
    assert page.locator(".panel [aria-pressed=true]").count() > 0


def test_ticks_beyond_all_counts_end(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.three(), tmp_path)
    page.evaluate(
        """() => {
            for (const run of strettoPage.runs) for (const s of run.series) if (s.panel === "loss")
                s.values = Float64Array.from(s.values, (_, i) => 1e17 + 16 * (i % 4));
            strettoPage.setAxis("sp");
        }"""
    )
    seen.frames()
    assert page.locator(".panel").count() > 3


def test_a_run_that_cannot_be_read_is_a_panel(seen: Seen, tmp_path: Path) -> None:
    bad = {**payloads.payload(*payloads.three()["runs"])["runs"][0], "name": "bad"}
    empty = {"n": 0, **dict.fromkeys(UNITS)}
    bad |= {"problem": f"it has {HOSTILE}", "clock": empty, "series": [], "events": []}
    page = seen.show(payloads.payload(*payloads.three()["runs"], bad), tmp_path)
    assert page.locator("#problems h2").inner_text() == "bad"
    assert page.locator("#problems p").text_content() == f"cannot be read: it has {HOSTILE}"
    assert page.locator("#panels .panel").count() > 3


def colours_of(page: Page, panel: str) -> list[str]:
    return [
        str(line.get_attribute("stroke"))
        for line in page.locator(f".panel:has(h2:text('{panel}')) .values line").all()
    ]


def test_training_and_validation_have_colours_of_their_own(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.payload(payloads.run("a")), tmp_path)
    training, validation = colours_of(page, "loss")
    assert training != validation
    assert len(set(colours_of(page, "batch size"))) == 2
    first = page.locator(".panel .values span span").all_text_contents()[:2]
    assert [text.split()[0] for text in first] == ["training", "validation"]
    page = seen.show(payloads.three(), tmp_path)
    assert len(set(colours_of(page, "loss"))) == 6
    dotted = page.locator(".panel").first.locator(".values .swatch:has(circle)")
    assert dotted.count() == 3  # of the validation losses
    run = page.locator("#legend button .swatch").first.evaluate("e => getComputedStyle(e).color")
    rgb = [int(part) for part in re.findall(r"\d+", run)]
    assert "#{:02x}{:02x}{:02x}".format(*rgb) == colours_of(page, "loss")[0]


def test_the_key_names_lines_and_marks(seen: Seen, tmp_path: Path) -> None:
    page = seen.show(payloads.payload(payloads.run("a")), tmp_path)
    key = page.locator("#key > span")
    texts = [text.strip("○▲◆↻▶✕■") for text in key.all_text_contents()]
    marks = ["evaluation", "checkpoint", "change of size", "start", "resume", "out of memory"]
    assert texts == ["measured", "planned", *marks]
    dashes = [key.nth(i).locator("line").get_attribute("stroke-dasharray") for i in (0, 1)]
    assert dashes[0] == ""
    assert dashes[1]
    batch_size = page.locator(".panel:has(h2:text('batch size')) .values line")
    assert {line.get_attribute("stroke-dasharray") for line in batch_size.all()} == set(dashes)
    # The marks of sizes are where the size changes.
    found = page.evaluate(
        "strettoPage.runs[0].events.filter(e => e.kind === 'decided_size').map(e => e.text)"
    )
    assert found == ["8 to 16", "16 to 32", "32 to 64"]
    page.locator("#legend button").click()
    seen.frames()
    assert key.count() == 0


TEXTS = """globalThis.texts = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const {a, e} = this.getTransform();
  if (this.textAlign !== "left") texts.push([text, this.textAlign, a * x + e, this.measureText(text).width * a, this.canvas.width]);
  return write.call(this, text, x, y);
};"""  # noqa: E501


def labels(page: Page, align: str) -> set[str]:
    found = page.evaluate("texts")
    half = {"right": 1, "center": 0.5}
    for text, how, x, width, end in found:
        assert x - half[how] * width > -2, f"{text} is clipped"
        assert x + (1 - half[how]) * width < end + 2, f"{text} is clipped"
    return {text for text, how, *_ in found if how == align and text}


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        ("sp", {"0", "50M", "100M", "8,192", "16K", "128K"}),
        ("tok", {"0", "5B", "10B"}),
        ("ba", {"0", "1,000", "2,000"}),
        ("dur", {"0%", "50%", "100%"}),
        ("ep", {"0", "1", "2", "3"}),
    ],
)
def test_labels_of_axes_are_round_and_not_clipped(
    seen: Seen, tmp_path: Path, unit: str, wanted: set[str]
) -> None:
    seen.page.add_init_script(TEXTS)
    big = payloads.run("a", 2_000, sizes=(8192, 16384, 65536, 131072))
    page = seen.show(payloads.payload(big), tmp_path, f"#axis={unit}")
    found = labels(page, "right") | labels(page, "center")
    assert wanted <= found
    for button in page.get_by_role("button", name="log", exact=True).all():
        button.click()
    seen.frames()
    found |= labels(page, "right")
    low, high = view(page)
    page.evaluate(f"strettoPage.zoomTo({low + (high - low) * 0.4}, {low + (high - low) * 0.44})")
    seen.frames()
    labels(page, "center")
    round_one = re.compile(r"-?[\d,]{1,5}(\.\d{1,3})?[KMBT%]?|\d+e-\d+|[\d.]+ [KMGT]?i?B")
    assert [text for text in found if not round_one.fullmatch(text)] == []


@pytest.mark.parametrize(("low", "is_log"), [(0.4, False), (0.04, True), (-0.04, False)])
def test_a_loss_over_a_decade_has_a_logarithmic_axis(
    seen: Seen, tmp_path: Path, low: float, is_log: bool
) -> None:
    record = payloads.run("a", points=20)
    rows = np.frombuffer(base64.b64decode(record["series"][0]["rows"]), "<u4")
    values = np.geomspace(3, abs(low), rows.size) * np.where(rows == rows[-1], np.sign(low), 1)
    record["series"] = [payloads.series("loss", "loss", rows, values)]
    page = seen.show(payloads.payload(record), tmp_path)
    button = page.locator(".panel button", has_text="log")
    assert button.get_attribute("aria-pressed") == str(is_log).lower()
    button.click()
    seen.frames()
    assert button.get_attribute("aria-pressed") == str(not is_log).lower()


def test_a_wide_table_scrolls_on_a_phone(seen: Seen, tmp_path: Path) -> None:
    seen.page.set_viewport_size({"width": 390, "height": 800})
    page = seen.show(payloads.three(), tmp_path)
    for table in page.locator(".scroll").all():
        inner, outer = table.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert inner > outer
        table.evaluate("e => { e.scrollLeft = 200; }")
        first = table.locator("tbody td").first.bounding_box()
        box = table.bounding_box()
        assert first
        assert box
        assert first["x"] == box["x"], "the name of a row stays"
        assert table.get_attribute("tabindex") == "0"
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def straight(name: str, losses: list[float], *, batch: int = 1, **more: Any) -> dict[str, Any]:
    """Return a run with these losses at batches 1, 2, ... and 10 samples a batch, or more."""
    rows = np.arange(len(losses))
    columns = {"ba": rows + 1, "sp": (rows + 1) * 10 * batch}
    clock = payloads.clock({**dict.fromkeys(UNITS), **columns})
    found = [payloads.series("loss", "loss", rows, losses, label="training loss")]
    record = {"name": name, "kind": "run", "clock": clock, "series": found, "events": []}
    return {**record, "stages": None, "facts": [], **more}


def test_the_difference_of_two_losses_on_any_axis(seen: Seen, tmp_path: Path) -> None:
    # On batches they differ by 1, 2, 3, 4; on samples, b is at 20, 40, 60, 80.
    pair = straight("a", [4, 3, 2, 1]), straight("b", [5, 5, 5, 5], batch=2)
    page = seen.show(payloads.payload(*pair), tmp_path)
    assert page.locator("#compare").text_content().startswith("loss minus that of")  # type: ignore[union-attr]
    page.locator("#compare select").focus()
    page.keyboard.press("ArrowDown")
    seen.frames()
    found = "(t => t && [...t.x].map((x, i) => [x, t.s.values[t.index[i]]]))"
    panel = "(strettoPage.panels.find(p => p.key === 'loss_difference').traces[0])"
    assert page.evaluate(found + panel) == [[1, 1], [2, 2], [3, 3], [4, 4]]
    choose(seen, "sp")
    wanted = np.array([[20, 2], [40, 4], [60, np.nan], [80, np.nan]])
    assert np.array(page.evaluate(found + panel), float) == pytest.approx(wanted, nan_ok=True)
    assert "from a" in (page.locator(".panel h2").nth(1).text_content() or "")
    page.reload()
    seen.frames()
    assert page.locator("#compare select").input_value() == "a"
    assert page.locator(".panel").count() == 2
    page.locator("#compare select").select_option("")
    seen.frames()
    assert page.locator(".panel").count() == 1


def test_points_between_those_of_the_other_run_are_on_its_line(seen: Seen, tmp_path: Path) -> None:
    pair = straight("a", [4, 2, 0], batch=2), straight("b", [1, 1, 1])
    page = seen.show(payloads.payload(*pair), tmp_path, "#axis=sp&minus=a")
    values = page.evaluate("[...strettoPage.panels[1].traces[0].s.values]")
    assert np.array(values, float) == pytest.approx([np.nan, -3, -2], nan_ok=True)


def test_settings_that_differ_are_a_table(seen: Seen, tmp_path: Path) -> None:
    settings = [["optimizer.lr", "0.1"], ["optimizer.momentum", "0.9"], ["batch_size", "8"]]
    other = [["optimizer.lr", "0.2"], ["optimizer.momentum", "0.9"], ["batch_size", "16"]]
    facts: dict[str, Any] = {"facts": [["batch size", "Constant(8)"], ["device", "cpu"]]}
    runs = [
        straight("a", [1, 2], settings=settings, **facts),
        straight("b", [1, 2], settings=[*other, ["seed", "1"]], **facts),
        straight("own loop", [1, 2], settings=[], facts=[["device", "cuda"]]),
    ]
    page = seen.show(payloads.payload(*runs), tmp_path)
    rows = page.locator("#facts tbody tr")
    assert [row.locator("td").all_text_contents() for row in rows.all()] == [
        ["batch size", "Constant(8)", "Constant(8)", NONE],
        ["device", "cpu", "cpu", "cuda"],
        ["optimizer.lr", "0.1", "0.2", ""],
        ["seed", NONE, "1", ""],
    ]
    page.locator("#settings summary").click()
    assert "optimizer.momentum" in (page.locator("#settings").inner_text())
    page = seen.show(payloads.payload(runs[0]), tmp_path)
    assert page.locator("#facts table").count() == 0


class TestManyRuns:
    def test_a_field_finds_runs_by_name(self, seen: Seen, tmp_path: Path) -> None:
        runs = [straight(f"{kind}-{n}", [1, 2]) for kind in ("warm", "Cold") for n in range(5)]
        page = seen.show(payloads.payload(*runs), tmp_path)
        page.get_by_role("searchbox", name="find a run").fill("cold")
        names = page.locator("#legend button").all_text_contents()
        assert names == [f"Cold-{n}" for n in range(5)]
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("strettoPage.runs.filter(run => !run.shown).map(run => run.name)") == [
            "Cold-0"
        ]
        assert page.evaluate("document.activeElement.textContent") == "Cold-0"
        page = seen.show(payloads.payload(*runs[:3]), tmp_path)
        assert not page.locator("#search").is_visible()
        page = seen.show(payloads.payload(), tmp_path)
        assert page.locator("#legend").inner_text() == "no runs yet"

    def test_a_run_that_was_not_sent_is_asked_for(self, seen: Seen) -> None:
        names = ["a", *(f"old-{n}" for n in range(60))]
        made = payloads.payload(straight("a", [1, 2]), live=True)
        server = LiveServer({**made, "names": names})
        server.more["names"] = names
        try:
            page = seen.go(server.address)
            assert page.locator("#legend button").count() == 40
            assert "21 more" in page.locator("#legend").inner_text()
            page.locator("#search").fill("old-57")
            page.locator("#legend button").click()
            server.changed.append(straight("old-57", [3, 4]))
            seen.until("strettoPage.runs.length === 2")
            assert page.evaluate("strettoPage.runs[1].shown")
            seen.until("true")
            ends = [one for one in server.queries if one.get("also")]
            while not ends:
                page.wait_for_timeout(50)
                ends = [one for one in server.queries if one.get("also")]
            assert [one["new"] for one in server.queries if "new" in one] == [["old-57"]]
            assert ends[0]["also"] == ["old-57"]
            server.more["names"] = ["a", "new"]
            page.locator("#search").fill("")
            page.locator("#legend button").first.focus()
            seen.until("[...document.querySelectorAll('#legend button')].length === 3")
            assert page.evaluate("document.activeElement.textContent") == "a"
            page.reload()
            seen.until("strettoPage.runs.length === 2")
        finally:
            seen.page.goto("about:blank")  # it asks no more
            server.close()
