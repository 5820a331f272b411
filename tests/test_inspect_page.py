# SPDX-License-Identifier: Apache-2.0
"""The HTML report: data is never markup, every box explains itself, Chromium shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from inspect_graphs import TP, Softmaxed, k3_text, mlp_text, printed, traced

import sp_passes
from sp_passes.inspect import Inspection, inspect, load
from sp_passes.inspect.layout import place
from sp_passes.inspect.page import html

CONFIG = sp_passes.SPConfig(tp_size=TP)
CHROMIUM = next((p for n in ("chromium", "chromium-browser") if (p := shutil.which(n))), None)


def look(folder: Path, text: str) -> Inspection:
    path = folder / "dump.txt"
    path.write_text(text)
    (found,) = load(path).dumps
    return inspect(found, CONFIG)


@pytest.mark.parametrize("graphviz", [True, False])
def test_layouts_point_downwards_and_do_not_overlap(graphviz: bool) -> None:
    sizes = [(100.0, 30.0)] * 6
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 4), (4, 5), (3, 5)]
    placed = place(sizes, edges, graphviz)
    assert all(placed.boxes[a][1] < placed.boxes[b][1] for a, b in edges)
    for i, (x, y) in enumerate(placed.boxes):
        assert x - 50 > 0 and x + 50 < placed.width and y - 15 > 0 and y + 15 < placed.height
        for u, v in placed.boxes[i + 1 :]:
            assert abs(x - u) >= 100 or abs(y - v) >= 30
    assert all(len(curve) % 3 == 1 for curve in placed.curves)


def test_data_of_a_dump_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>x=1</script><img src=x onerror=alert(1)>"
    text = mlp_text().replace("# File: ", f"# File: {evil}")
    text = text.replace("torch.ops.aten.silu.default(", "torch.ops.a.b.default('" + evil + "', ")
    made = look(tmp_path, f"===== {evil} =====\n{text}")
    assert made.title == evil
    page = html([made])
    assert evil not in page and "<img" not in page
    assert page.count("<script") == page.count("</script") == 2


def test_the_page_is_one_file_without_network(tmp_path: Path) -> None:
    page = html([look(tmp_path, k3_text())])
    assert not re.search(r"(?:src|href)=['\"](?!#)", page)
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)
    assert "default-src 'none'" in page


def test_every_box_leads_to_its_sites(tmp_path: Path) -> None:
    page = html([look(tmp_path, k3_text())])
    (text,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text)
    drawn = {int(n) for n in re.findall(r'data-box="(\d+)"', page)}
    assert drawn == set(range(len(data["boxes"])))
    green = [b for b in data["boxes"] if b["decision"] == "applied" and b["kind"] == "linear"]
    assert green and all(b["sites"] for b in green)
    assert all(data["sites"][s]["pattern"] for b in green for s in b["sites"])
    assert {"before", "after"} <= set(re.findall(r"<figcaption>(\w+)<", page))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_chromium_opens_it_and_a_click_explains(tmp_path: Path) -> None:
    made = look(tmp_path, k3_text().replace("mm.default", "mm.default"))
    path = tmp_path / "report.html"
    click = (
        "<script>[...document.querySelectorAll('g.box.applied')]"
        ".find(g => g.textContent.includes('shared_experts.gate_up'))"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}));</script></body>"
    )
    path.write_text(html([made]).replace("</body>", click))
    dom = _chromium(path, "--dump-dom")
    boxes = int(re.findall(r'data-ready="(\d+)"', dom)[0])
    assert boxes > 60  # the page's own script ran to its end
    details = re.findall(r'<div id="details">(.*?)<div class="legend">', dom, re.DOTALL)[0]
    assert "applied · replicated_mlp" in details and "+1 all_gather" in details
    shot = tmp_path / "shot.png"
    _chromium(path, f"--screenshot={shot}", "--window-size=1640,1500")
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and shot.stat().st_size > 50_000
    if os.environ.get("SP_PASSES_SCREENSHOT"):
        shutil.copy(shot, os.environ["SP_PASSES_SCREENSHOT"])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_chromium_shows_a_near_miss_from_the_table(tmp_path: Path) -> None:
    made = look(tmp_path, printed(traced(Softmaxed())))
    path = tmp_path / "report.html"
    click = "<script>document.querySelector('tr.skipped').click();</script></body>"
    path.write_text(html([made], graphviz=False).replace("</body>", click))
    dom = _chromium(path, "--dump-dom")
    details = re.findall(r'<div id="details">(.*?)<div class="legend">', dom, re.DOTALL)[0]
    assert "may mix features" in details and "what would make it pass" in details


def _chromium(path: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={path.parent / 'profile'}", *options, path.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout
