"""The page of `fusegen report` in a real browser: colours, widths, and all of it by keyboard.

Needs Chromium and its driver, which pip cannot install: `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

BROWSERS, DRIVER = ("chromium", "google-chrome", "chrome"), "chromedriver"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    not (BROWSER and shutil.which(DRIVER)),
    reason="no browser: apt-get install chromium chromium-driver",
)

CONTRAST = 4.5
"""Of text and what it stands on, at least (WCAG 2.2, 1.4.3)."""
PAIRS = [
    *((text, place) for text in ("ink", "soft") for place in ("page", "card", "given", "saved")),
    *(("ink", place) for place in ("step", "fused", "left", "exchange", "bar", "theirs")),
    *(("soft", "step"), ("link", "page"), ("link", "card"), ("link", "step")),
    *(("fused-rule", "fused"), ("warn", "card"), ("warn", "page"), ("saved-rule", "card")),
]
COLOURS = """
const probe = document.createElement("p");
document.body.append(probe);
const colour = (name) => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number);
};
const found = arguments[0].map((pair) => pair.map(colour));
probe.remove();
return found;
"""
ACTIVE = "return document.activeElement"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a bundle with a few modules, as a file that a browser opens."""
    folder = tmp_path_factory.mktemp("report")
    names = ("--module", "grouped_mlp", "--module", "silu", "--module", "swiglu")
    selection = ("--arch", "sm_90a", *names, "--recipe", "bf16", "--namespace", "acme")
    sizes = ("--sizes", "T=8192,E=8,H=1024,F=512", "--out", "report.html")
    for words in (("vendor", "experts", *selection), ("report", "experts", *sizes)):
        subprocess.run([sys.executable, "-m", "fusegen", *words], cwd=folder, check=True)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(shutil.which(DRIVER))) as found:
        yield found


def show(browser: webdriver.Chrome, page: Path, *, width: int = 1440, dark: bool = False) -> None:
    """Open the page anew, in a window of a width and under the colours of a system."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    quiet = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, quiet]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get(page.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get(page.as_uri())


def press(browser: webdriver.Chrome, *keys: str) -> Any:
    """Press keys, one behind the other; what has the focus then."""
    for key in keys:
        ActionChains(browser).send_keys(key).perform()
    return browser.execute_script(ACTIVE)


def tab_to(browser: webdriver.Chrome, selector: str) -> Any:
    """Press Tab until an element has the focus."""
    for _ in range(200):
        found = press(browser, Keys.TAB)
        if browser.execute_script("return arguments[0].matches(arguments[1])", found, selector):
            return found
    raise AssertionError(f"Tab never comes to {selector}")


def luminance(colour: list[float]) -> float:
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def shown(browser: webdriver.Chrome) -> list[str]:
    """Modules that can be seen."""
    script = """return [...document.querySelectorAll("details.cell")]
      .filter((each) => each.checkVisibility()).map((each) => each.querySelector("h4").innerText)"""
    found: list[str] = browser.execute_script(script)
    return found


def test_contrast_is_that_of_wcag() -> None:
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast([119, 119, 119], [255, 255, 255]) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("width", [1440, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_can_be_read(
    browser: webdriver.Chrome, page: Path, dark: bool, width: int, tmp_path: Path
) -> None:
    show(browser, page, dark=dark, width=width)
    browser.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")
    for pair, colours in zip(PAIRS, browser.execute_script(COLOURS, PAIRS), strict=True):
        assert contrast(*colours) >= CONTRAST, pair
    ground = browser.execute_script(COLOURS, [["page"]])[0][0]
    assert (luminance(ground) < 0.1) == dark
    sizes = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert sizes[0] <= sizes[1] == width
    wide = browser.execute_script(
        """return [...document.querySelectorAll("main *:not(svg *)")].filter((each) =>
          !each.closest(".scroll") && each.getBoundingClientRect().right > innerWidth + 1).length"""
    )
    assert wide == 0
    file = tmp_path / "page.png"
    assert browser.save_screenshot(str(file)) and file.stat().st_size > 10_000
    assert browser.get_log("browser") == []


def test_text_of_a_graph_lies_in_its_box(browser: webdriver.Chrome, page: Path) -> None:
    """As the browser's own type has it, whose letters may be wider than thought."""
    show(browser, page)
    browser.execute_script("for (const e of document.querySelectorAll('details')) e.open = true")
    outside = browser.execute_script(
        """const wrong = [];
        for (const svg of document.querySelectorAll("svg")) {
          const boxes = [...svg.querySelectorAll("rect:not(.fused)")].map((e) => e.getBBox());
          for (const text of svg.querySelectorAll("text:not(.lane)")) {
            const t = text.getBBox();
            const inside = (b) => t.x >= b.x && t.y >= b.y - 1
              && t.x + t.width <= b.x + b.width && t.y + t.height <= b.y + b.height + 1;
            if (!boxes.some(inside)) wrong.push(text.textContent);
          }
        }
        return wrong;"""
    )
    assert outside == []


def test_all_of_it_by_keyboard(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    assert press(browser, Keys.TAB).text == "Skip to the modules"
    assert browser.execute_script(ACTIVE).rect["x"] >= 0  # where it can be seen
    press(browser, Keys.ENTER)
    tab_to(browser, "#filter")
    press(browser, *"swiglu")
    assert shown(browser) == ["grouped_mlp__bf16", "swiglu__bf16"]
    assert browser.find_element("id", "shown").text == "2 of 3 modules"
    press(browser, *" pointwise_swiglu")
    assert shown(browser) == ["swiglu__bf16"]
    press(browser, Keys.TAB, Keys.TAB)
    summary = tab_to(browser, "summary")
    assert "swiglu__bf16" in summary.text
    cell = summary.find_element("xpath", "..")
    press(browser, Keys.SPACE)
    assert cell.get_attribute("open")
    graph = press(browser, Keys.TAB)
    assert graph.get_attribute("role") == "region" and graph.find_elements("tag name", "svg")
    outline = browser.execute_script("return getComputedStyle(arguments[0]).outlineWidth", graph)
    assert outline == "3px"  # the focus can be seen
    inner = press(browser, Keys.TAB)
    assert inner.text == "Steps of the forward"
    press(browser, Keys.ENTER)
    assert not inner.find_element("xpath", "..").get_attribute("open")
    tab_to(browser, "#filter")
    press(browser, Keys.ESCAPE)
    assert len(shown(browser)) == 3


def test_a_graph_is_scrolled_by_keyboard(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page, width=400)
    browser.execute_script("document.querySelector('details.cell').open = true")
    graph = tab_to(browser, ".graph")
    press(browser, *[Keys.ARROW_RIGHT] * 3)
    deadline = time.monotonic() + 5
    while not browser.execute_script("return arguments[0].scrollLeft", graph):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_link_of_the_support_opens_its_module(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    tab_to(browser, "table.support td a")
    press(browser, Keys.ENTER)
    cell = browser.find_element("css selector", "details.cell")
    assert cell.get_attribute("open")
    assert "grouped_mlp__bf16" in browser.execute_script(ACTIVE).text


def test_colours_are_chosen_by_keyboard_and_kept(browser: webdriver.Chrome, page: Path) -> None:
    show(browser, page)
    tab_to(browser, "#theme")
    press(browser, "d")
    root = browser.find_element("tag name", "html")
    assert root.get_attribute("data-theme") == "dark"
    assert luminance(browser.execute_script(COLOURS, [["page"]])[0][0]) < 0.1
    browser.get(page.as_uri())
    root = browser.find_element("tag name", "html")
    assert root.get_attribute("data-theme") == "dark"
    show(browser, page, dark=True)
    tab_to(browser, "#theme")
    press(browser, "l")
    assert luminance(browser.execute_script(COLOURS, [["page"]])[0][0]) > 0.8


def test_without_scripts_all_is_there(browser: webdriver.Chrome, page: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(page.as_uri())
        assert not browser.find_element("id", "filter").is_displayed()
        assert not browser.find_element("id", "theme").is_displayed()
        assert len(browser.find_elements("css selector", "details.cell")) == 3
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
