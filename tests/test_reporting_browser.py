"""The page of `batchgen report` in Chromium, opened from disk: `pytest -m browser`."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests import runs
from tests.pages import HOSTILE

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with hostile prompts, ids and columns, of three groups, with failed rows, and with a hostile name."""
    folder = tmp_path_factory.mktemp("runs")
    rows: list[dict[str, Any]] = [
        {"id": f"{n} {text[:60]}", "prompt": text, "own": text} for n, text in enumerate(HOSTILE)
    ]
    rows += [{"id": f"fox {n}", "prompt": f"a red fox, view {n}", "own": "", "width": 128} for n in range(20)]
    rows += [{"id": f"owl {n}", "prompt": f"an Owl of SNOW {n}", "own": "", "height": 96} for n in range(20)]
    rows += [{"id": f"bad {n}", "prompt": "fault: flat" if n else "fault: <i>", "own": HOSTILE[0]} for n in range(4)]
    rows = [{"width": 64, "height": 64, **row, "seed": n % 5 if n % 2 else 2**64 - 1 - n} for n, row in enumerate(rows)]
    out = folder / "<img src=x onerror=document.title='broken in'>"
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    source = runs.manifest(folder / "m.parquet", {**columns, "seed": pa.array(columns["seed"], pa.uint64())})
    assert runs.run(source, out, "--set", "model.variant=faults").code == 3
    assert runs.batchgen("report", out).code == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    """Debian's, with all its logs; no proxy and no network are needed."""
    places = shutil.which("chromium"), shutil.which("chromedriver")
    assert all(places), "Chromium is not installed: apt-get install chromium chromium-driver, or leave out -m browser"
    options = webdriver.ChromeOptions()
    options.binary_location = str(places[0])
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(places[1])))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def opened(chromium: webdriver.Chrome, page: Path) -> webdriver.Chrome:
    show(chromium, page)
    return chromium


def show(driver: webdriver.Chrome, page: Path, width: int = 1400, scheme: str = "light") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.get_log("browser")
    driver.get_log("performance")
    driver.get(page.as_uri())


def shown(driver: webdriver.Chrome) -> list[WebElement]:
    return driver.find_elements(By.CSS_SELECTOR, ".card:not([hidden])")


def ids(driver: webdriver.Chrome) -> list[str]:
    """Of the cards that are shown, in their order."""
    script = """return [...document.querySelectorAll('.card:not([hidden])')].map(card =>
        [...card.querySelectorAll('dt')].find(dt => dt.textContent === 'id').nextElementSibling.textContent)"""
    found: list[str] = driver.execute_script(script)
    return found


def search(driver: webdriver.Chrome, text: str) -> list[str]:
    box = driver.find_element(By.ID, "search")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(text or Keys.DELETE)
    return ids(driver)


def choose(driver: webdriver.Chrome, name: str, value: str) -> list[str]:
    Select(driver.find_element(By.ID, name)).select_by_value(value)
    return ids(driver)


def headings(driver: webdriver.Chrome) -> list[str]:
    return [one.text for one in driver.find_elements(By.CSS_SELECTOR, "#cards .heading")]


def requests(driver: webdriver.Chrome) -> list[str]:
    """Addresses that the page asked for, but for what lies in itself."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


def test_it_opens_from_disk_without_a_request_or_an_error(opened: webdriver.Chrome, page: Path) -> None:
    pictures = opened.execute_script("return [...document.querySelectorAll('.card img')].map(img => img.naturalWidth)")
    assert len(pictures) == len(HOSTILE) + 40
    assert min(pictures) > 0
    search(opened, "fox")
    shown(opened)[0].find_element(By.CSS_SELECTOR, ".picture").click()
    assert requests(opened) == [page.as_uri()]
    assert opened.get_log("browser") == []


def test_pictures_are_shown_whole(opened: webdriver.Chrome) -> None:
    """In a box of their own, whatever their proportions, on the page and in the viewer."""
    search(opened, "owl")
    shown(opened)[0].find_element(By.CSS_SELECTOR, ".picture").send_keys(Keys.ENTER)
    script = """return [...document.querySelectorAll('.card:not([hidden]) img, #shown img')].map(img => {
        const [box, own] = [img.parentElement.getBoundingClientRect(), img.getBoundingClientRect()];
        return Math.max(...['x', 'y', 'width', 'height'].map(side => Math.abs(box[side] - own[side])))})"""
    found = opened.execute_script(script)
    assert len(found) == 21
    assert max(found) < 0.5


def test_hostile_values_stay_text(opened: webdriver.Chrome, page: Path) -> None:
    name = page.parent.name
    assert opened.title == f"{name} – batchgen report"
    assert opened.execute_script("return document.querySelector('h1').textContent") == name
    texts = opened.execute_script(
        "return [...document.querySelectorAll('.card')].map(card => [card.querySelector('.prompt').textContent,"
        "card.querySelector('dl').lastElementChild.textContent])"
    )
    assert [text for text in HOSTILE if [text, text] not in texts] == []
    foreign = (
        "document.querySelectorAll('main script, main i, main b:not(.tile b), main iframe, img:not([src^=\"data:\"])')"
    )
    assert opened.execute_script(f"return {foreign}.length") == 0


def test_an_injected_script_would_not_run(opened: webdriver.Chrome) -> None:
    """The page's policy, should an escape ever be missed."""
    opened.execute_script(
        "const one = document.createElement('div'); document.body.append(one);"
        'one.innerHTML = \'<img src=x onerror="document.title = 1"><a href="javascript:document.title=1">x</a>\';'
        "const two = document.createElement('script'); two.textContent = 'document.title = 2';"
        "document.body.append(two)"
    )
    refusals = WebDriverWait(opened, 60).until(lambda driver: driver.get_log("browser"))
    assert "Content Security Policy" in refusals[0]["message"]
    assert opened.title.endswith("batchgen report")


def test_search_and_choices(opened: webdriver.Chrome) -> None:
    count = opened.find_element(By.ID, "count")
    all_ids = ids(opened)
    assert all_ids[:4] == [f"bad {n}" for n in range(4)]
    assert count.text == f"{len(all_ids)} images"
    assert search(opened, "FOX red") == [f"fox {n}" for n in range(20)]
    assert count.text == f"20 of {len(all_ids)} images"
    assert search(opened, "snow view") == []
    assert search(opened, "owl 96 snow") == [f"owl {n}" for n in range(20)]
    assert search(opened, "<script>") == ["bad 0", "bad 1", "bad 2", "bad 3", f"0 {HOSTILE[0][:60]}"]
    assert search(opened, "") == all_ids
    assert choose(opened, "show", "failed") == all_ids[:4]
    assert search(opened, "every pixel") == ["bad 1", "bad 2", "bad 3"]
    assert choose(opened, "show", "") == ["bad 1", "bad 2", "bad 3"]
    search(opened, "")
    groups = [one.get_attribute("value") or "" for one in Select(opened.find_element(By.ID, "group")).options]
    parts = [choose(opened, "group", value) for value in groups]
    assert parts[0] == all_ids
    assert sorted(id_ for part in parts[1:] for id_ in part) == sorted(all_ids)
    assert [f"fox {n}" for n in range(20)] in parts


def test_orders(opened: webdriver.Chrome) -> None:
    before = ids(opened)
    by_group = choose(opened, "order", "group")
    assert sorted(by_group) == sorted(before) != by_group
    assert len(headings(opened)) == 3
    assert any(one == "128×64, guided" for one in headings(opened))
    choose(opened, "order", "seed")
    assert headings(opened) == [*(f"seed {n}" for n in range(5)), "seeds of one image"]
    seeds = opened.execute_script("return [...document.querySelectorAll('.card')].map(card => card.dataset.seed)")
    alone = [int(seed) for seed in seeds if int(seed) > 4]
    assert alone == sorted(alone)
    assert len(alone) > 20
    assert choose(opened, "order", "") == before
    assert headings(opened) == []


def test_the_viewer_shows_all_of_an_image_and_steps(opened: webdriver.Chrome, page: Path) -> None:
    search(opened, "fox")
    first = shown(opened)[0]
    first.find_element(By.CSS_SELECTOR, ".picture").send_keys(Keys.ENTER)
    viewer = opened.find_element(By.ID, "viewer")
    assert viewer.is_displayed()
    assert "a red fox, view 0" in viewer.text
    link = viewer.find_element(By.CSS_SELECTOR, "a").get_attribute("href")
    assert link is not None
    assert link.startswith(page.parent.as_uri().replace("'", "%27").rsplit("/", 1)[0])
    viewer.send_keys(Keys.ARROW_RIGHT)
    assert "a red fox, view 1" in viewer.text
    opened.find_element(By.ID, "before").click()
    assert "a red fox, view 0" in viewer.text
    opened.find_element(By.ID, "before").click()
    assert "a red fox, view 0" in viewer.text
    viewer.send_keys(Keys.ESCAPE)
    assert not viewer.is_displayed()


@pytest.mark.parametrize("width", [320, 400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_widths_and_colours(chromium: webdriver.Chrome, page: Path, width: int, scheme: str) -> None:
    show(chromium, page, width, scheme)
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    kinds = [one.is_displayed() for one in chromium.find_elements(By.CSS_SELECTOR, ".plot.wide, .plot.narrow")]
    assert kinds == [width > 640, width <= 640] * 2
    picture = chromium.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("L"))
    assert (np.median(pixels) > 200) if scheme == "light" else (np.median(pixels) < 60)
    inks = {one.value_of_css_property("fill") for one in chromium.find_elements(By.CSS_SELECTOR, ".plot svg text")}
    assert len(inks) == 1
    assert ("230" in inks.pop()) == (scheme == "dark")
