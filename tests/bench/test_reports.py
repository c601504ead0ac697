"""Results as files, comparisons, the report and the charts."""

import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import msgspec
import pytest

from ejkernel import cli
from ejkernel.bench import _charts, _compare, _report, _results
from ejkernel.bench._results import OURS, Ceiling, Program, Row, Verdict

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def program(name, median, spread=0.0, **more):
    kind = OURS if "/" in name else "peer"
    return Program(name, kind, median, spread, rounds=5, **more)


def row(op, *programs, workload="B1", mode="fwd", **more):
    made = {"flops": 2_000_000_000, "bytes": 1_000_000, "auto": "xla/any"} | more
    return Row(op, workload, mode, "float32", list(programs), **made)


def document(*rows, device="cpu|here"):
    made = _results.new(list(rows))
    made.device = device
    made.ceilings = [
        Ceiling("matmul", "float32", 2.0, "TFLOP/s"),
        Ceiling("copy", "float32", 10.0, "GB/s"),
    ]
    _results.fill_rates(made)
    return made


def sample():
    ours, peer = program("xla/any", 2.0, 0.1, config={"forward": "<b>"}), program("jax.nn", 4.0)
    failed = Program("triton/gpu", OURS, failed="wrong: <script>alert(1)</script>")
    return document(
        row("flash_attention", ours, peer, failed, bars=[Verdict("auto", "jax.nn", 3.0, 2.0)]),
        row("mean_pooling", program("xla/any", 1.0), flops=1000, mode="fwd+bwd"),
        row("flash_attention", program("xla/any", 3.0), workload="B2"),
    )


def write(path, made):
    path.write_text(_results.encode(made))
    return str(path)


# Results


def test_rates_and_shares_follow_the_nearer_ceiling():
    made = sample()
    attention, pooling, _ = made.rows
    assert (attention.bound, attention.rate_unit) == ("compute", "TFLOP/s")
    ours = attention.program("xla/any")
    assert ours.rate == pytest.approx(1.0)  # 2 GFLOP in 2 ms
    assert ours.share == pytest.approx(0.5)
    assert (pooling.bound, pooling.programs[0].rate) == ("memory", pytest.approx(1.0))
    assert attention.program("triton/gpu").rate is None


def test_results_survive_a_file_and_others_are_refused(tmp_path):
    made = sample()
    assert _results.read(write(tmp_path / "a.json", made)) == made
    for text, words in (
        ("{", "holds no results"),
        ('{"rows": []}', "holds no results"),
        (_results.encode(made).replace('"schema": 1', '"schema": 9'), "schema 9"),
        (_results.encode(made).replace('"device"', '"devise"'), "holds no results"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            _results.read(tmp_path / "b.json")


def test_every_committed_result_has_the_one_format():
    files = {path.name for path in _charts.results()}
    kept = {path.name for path in _charts.RESULTS.glob("*.json")}
    outcomes = {"cpu_matrix.json", "cpu_hopper_matrix.json", "gpu_matrix.json"}  # of tests
    assert kept - files <= outcomes
    assert files


# Compare


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (program("xla/any", 1.0), program("xla/any", 1.04), "same"),
        (program("xla/any", 1.0), program("xla/any", 1.2), "slower"),
        (program("xla/any", 1.0, 0.1), program("xla/any", 1.2, 0.1), "same"),
        (program("xla/any", 1.2), program("xla/any", 1.0), "faster"),
        (program("xla/any", 1.0), Program("xla/any", OURS, failed="wrong"), "fails now"),
        (Program("xla/any", OURS, failed="wrong"), program("xla/any", 1.0), "new"),
    ],
)
def test_a_change_counts_beyond_the_noise_of_both(old, new, verdict):
    changes = _compare.compare(document(row("gla", old)), document(row("gla", new)))
    assert [change.verdict for change in changes] == [verdict]
    assert changes[0].is_regression == (verdict in ("slower", "fails now"))


def test_rows_and_programs_that_come_and_go_are_named():
    old = document(
        row("gla", program("xla/any", 1.0), program("x", 1.0)), row("a", program("x", 1))
    )
    new = document(row("gla", program("xla/any", 1.0), program("y", 1.0)))
    verdicts = {(c.row.op, c.name): c.verdict for c in _compare.compare(old, new)}
    assert verdicts == {
        ("gla", "xla/any"): "same",
        ("gla", "x"): "gone",
        ("gla", "y"): "new",
        ("a", "x"): "gone",
    }


def test_the_command_leaves_with_1_on_a_regression_of_ours(tmp_path, capsys):
    fast = write(tmp_path / "old.json", document(row("gla", program("xla/any", 1.0))))
    slow = write(tmp_path / "new.json", document(row("gla", program("xla/any", 2.0))))
    assert cli.main(["bench", "--compare", fast, fast]) == 0
    assert cli.main(["bench", "--compare", slow, fast]) == 0
    assert "faster" in capsys.readouterr().out
    assert cli.main(["bench", "--compare", fast, slow]) == 1
    said = capsys.readouterr()
    assert "slower (regression)" in said.out
    assert "1 of 1 programs are slower" in said.err
    assert cli.main(["bench", "--compare", fast, slow, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["ratio"] == "2.00"
    other = write(tmp_path / "gpu.json", document(device="gpu|there"))
    assert cli.main(["bench", "--compare", fast, other]) == 2
    assert "different devices, cpu|here and gpu|there" in capsys.readouterr().err


def test_a_slower_peer_is_no_regression():
    old, new = (document(row("gla", program("jax.nn", ms))) for ms in (1.0, 9.0))
    (change,) = _compare.compare(old, new)
    assert (change.verdict, change.is_regression) == ("slower", False)


# Report


class Page(html.parser.HTMLParser):
    """Tags that are open, charts by section, texts, and addresses."""

    VOID = ("meta", "link", "rect", "line")

    def __init__(self, text):
        super().__init__()
        self.open, self.charts, self.addresses, self.text = [], {}, [], ""
        self.section = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.addresses += [v for k, v in given.items() if k in ("href", "src", "srcset", "action")]
        if tag == "section":
            self.section = given["id"]
        if tag == "svg":
            self.charts.setdefault(self.section, []).append(given["aria-label"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_has_a_chart_for_every_row_and_needs_nothing_else():
    text = _report.page(sample())
    page = Page(text)
    assert page.open == []
    assert {op: len(charts) for op, charts in page.charts.items()} == {
        "flash_attention": 2,
        "mean_pooling": 1,
    }
    assert set(page.addresses) == {"data:,", "#flash_attention", "#mean_pooling"}
    assert "http" not in text
    assert "url(" not in text
    assert "<script" not in text
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert "wrong: <script>alert(1)</script>" in page.text  # as text
    assert "auto beside jax.nn: 2.00, promised 3" in page.text
    assert "1 TFLOP/s · 2 ms · 50 %" in page.text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_report_without_errors(tmp_path, width):
    file = tmp_path / "r.html"
    # the page says how wide it became, which the dump of the page then shows
    probe = (
        "<script>addEventListener('load',()=>{document.body.dataset.wide="
        "document.documentElement.scrollWidth})</script></body>"
    )
    file.write_text(_report.page(sample()).replace("</body>", probe))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    (wide,) = re.findall(r'data-wide="(\d+)"', done.stdout)
    assert int(wide) <= max(width, 500)  # Chromium's windows are 500 wide at least
    assert done.stdout.count("<svg") == 3


# Charts


def test_charts_are_made_from_the_results_that_are_here():
    assert _charts.stale() == [], "run `make charts`"
    for file, text in _charts.charts().items():
        assert file.read_text() == text, f"{file.name}: run `make charts`"
        tree = ET.fromstring(text)
        assert tree.tag.endswith("svg")
        assert len(tree.findall(".//{*}rect[@class='ours']")) >= 1
        assert len(tree.findall(".//{*}rect[@class='peer']")) >= 1
        assert "prefers-color-scheme:dark" in text
    found = {path.name for path in _charts.CHARTS.glob("*.svg")}
    assert found == {file.name for file in _charts.charts()}
    assert "flash_attention-nvidia-h200.svg" in found


def test_a_chart_older_than_its_results_is_found(tmp_path, monkeypatch):
    results, charts = tmp_path / "results", tmp_path / "charts"
    results.mkdir()
    monkeypatch.setattr(_charts, "RESULTS", results)
    monkeypatch.setattr(_charts, "CHARTS", charts)
    monkeypatch.setattr("sys.argv", ["charts", "--write"])
    made = sample()
    write(results / "cpu.json", made)
    (results / "other.json").write_text('{"owner": "somebody"}')
    assert _charts.stale() == ["flash_attention-here.svg is missing"]
    assert _charts.main() == 0
    assert _charts.stale() == []
    digest = hashlib.sha256((results / "cpu.json").read_bytes()).hexdigest()
    assert digest in (charts / "flash_attention-here.svg").read_text()
    changed = msgspec.structs.replace(made, date="2031-01-01")
    write(results / "cpu.json", changed)
    assert _charts.stale() == ["flash_attention-here.svg is older than cpu.json"]
    (charts / "gone.svg").write_text("")
    assert _charts.main() == 0
    assert [p.name for p in charts.iterdir()] == ["flash_attention-here.svg"]


def test_a_chart_has_the_newest_of_rows_that_were_measured_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(_charts, "RESULTS", tmp_path)
    replace = msgspec.structs.replace
    made = sample()
    row = made.rows[0]
    past = replace(row, programs=[replace(p, median=7 * (p.median or 1)) for p in row.programs])
    others = replace(past, workload="another call")
    write(tmp_path / "a.json", replace(made, date="2031-02-01", rows=[row]))
    write(tmp_path / "b.json", replace(made, date="2031-01-01", rows=[past, others]))
    (text,) = _charts.charts().values()
    assert re.findall(r'class="head"[^>]*>([^<]+)<', text) == [row.workload, "another call"]
    assert "2031-01-01 to 2031-02-01" in text
    times = lambda svg: re.findall(r"[\d.,]+ ms", svg)
    apart = [times(_charts.chart([made], [one], "")) for one in (row, others)]
    assert apart[0] != apart[1]
    assert times(text) == [*apart[0], *apart[1]]


def test_documents_show_charts_that_exist():
    root = pathlib.Path(__file__).parents[2]
    shown = set()
    for page in (root / "README.md", root / "docs" / "benchmarks.md"):
        for link in re.findall(r"\]\(([^)]+\.svg)\)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page.name} shows {link}"
            shown.add((page.parent / link).resolve())
    assert shown == {path.resolve() for path in _charts.CHARTS.glob("*.svg")}
