"""What a run writes: each step once, readable lines, a page that stands alone."""

import base64
import io
import json
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest

from moejax.training import report
from moejax.training.evaluate import HeldOut
from moejax.training.metrics import MetricLog, MetricsError, Progress, duration, read_records, step_record


def fetched(step, experts=5, layers=2):
    rng = np.random.default_rng(step)
    count = rng.integers(0, 50, (layers, experts)).astype(np.int32)
    return {
        "loss": np.float32(3.0 / step),
        "balance_loss": np.float32(0.01),
        "grad_norm": np.float32(1.5),
        "learning_rate": np.float32(1e-3),
        "tokens": np.int32(640),
        "count_NxE": count,
        "entropy_N": np.full(layers, 1.25, np.float32),
        "dropped_N": np.array([0.0, 0.125], np.float32),
        "moved_bytes_N": np.array([3.0e9, 1.5e9], np.float32),
    }


def write_steps(folder, first, last, finished):
    log = MetricLog(folder, finished=finished, tensorboard=False)
    for step in range(first, last + 1):
        log.write(step_record(step, fetched(step), 0.5, with_load=step % 2 == 0))
    log.close()


def test_records_hold_each_step_once_after_an_interrupt(tmp_path):
    write_steps(tmp_path, 1, 7, finished=0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line
    write_steps(tmp_path, 6, 10, finished=5)  # the last checkpoint was of step 5
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 11))
    assert all(json.loads(json.dumps(record)) == record for record in records)


def test_log_says_how_many_records_are_gone(tmp_path):
    write_steps(tmp_path, 1, 3, finished=0)
    log = MetricLog(tmp_path, finished=5, tensorboard=False)
    assert log.missing == 2
    log.close()


def test_tensorboard_files_hold_the_scalars(tmp_path):
    log = MetricLog(tmp_path, finished=0, tensorboard=True)
    log.write(step_record(1, fetched(1), 0.5, with_load=True))
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for tag in (b"loss", b"grad_norm", b"learning_rate", b"tokens_per_second", b"expert_load_max/layer_01"):
        assert tag in content, tag


def test_record_of_a_step_has_load_entropy_and_drops_per_layer():
    metrics = fetched(3)
    record = step_record(3, metrics, 0.25, with_load=True)
    count = metrics["count_NxE"]
    np.testing.assert_allclose(record["expert_load_max"], count.max(1) / count.mean(1), atol=1e-4)
    np.testing.assert_allclose(record["expert_rows_mean"], count.mean(1), atol=1e-4)
    np.testing.assert_allclose(record["expert_load"], count / count.mean(1, keepdims=True), atol=1e-3)
    assert record["router_entropy"] == [1.25, 1.25] and record["dropped_fraction"] == [0.0, 0.125]
    assert record["tokens_per_second"] == 2560.0
    assert "expert_load" not in step_record(3, metrics, 0.25, with_load=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "lines"), [(io.StringIO(), 4), (Terminal(), 4)])
def test_progress_prints_a_line_per_interval(stream, lines):
    progress = Progress(30, 0, 10, stream)
    for step in range(1, 31):
        progress.update(step_record(step, fetched(step), 0.5, with_load=False))
    text = stream.getvalue()
    assert text.count("\n") == lines  # steps 1, 10, 20 and 30
    assert "step 20/30" in text and "tokens/s" in text and "ETA" in text and "loss 0.1500" in text
    assert ("\r" in text) == stream.isatty()


def test_duration():
    assert [duration(s) for s in (0, 42.4, 725, 11525)] == ["0:00", "0:42", "12:05", "3:12:05"]


def test_report_is_one_page_without_outside_parts():
    records = [step_record(step, fetched(step), 0.5, with_load=step % 10 == 0 or step == 1) for step in range(1, 41)]
    values = report.summary(records, HeldOut(nats=300.0, tokens=250, bytes=200), 1000, 400)
    assert values["heldout_nats_per_byte"] == 1.5
    assert values["heldout_bits_per_byte"] == pytest.approx(1.5 / np.log(2))
    assert (values["steps"], values["tokens"], values["seconds"]) == (40, 40 * 640, 20.0)
    assert values["tokens_per_second"] == 1280.0
    page = report.report_html(records, values, "if a < b: <x>", "recipe: fp32", "run & test")
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page and "@import" not in page
    assert "if a &lt; b: &lt;x&gt;" in page and "run &amp; test" in page
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(charts) == 7 + 2  # loss, throughput, norm, rate, busiest, entropy, dropped; a heat map per layer
    for chart in charts:
        ElementTree.fromstring(chart)  # well-formed


def test_the_summary_says_how_many_steps_it_leaves_out():
    """As after somebody deleted metrics.jsonl in the middle of a run."""
    records = [step_record(step, fetched(step), 0.5, with_load=False) for step in range(31, 41)]
    values = report.summary(records, HeldOut(nats=300.0, tokens=250, bytes=200), 1000, 400)
    assert (values["steps"], values["steps_without_record"], values["tokens"]) == (40, 30, 10 * 640)
    assert "leave out 30 steps whose records are no longer in metrics.jsonl" in report.summary_text(values)
    whole = report.summary(records[:0], HeldOut(nats=1.0, tokens=1, bytes=1), 1000, 400)
    assert whole["steps_without_record"] == 0 and "leave out" not in report.summary_text(whole)


def test_a_log_that_does_not_write_leaves_the_file_alone(tmp_path):
    write_steps(tmp_path, 1, 3, finished=0)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    log = MetricLog(tmp_path, finished=1, tensorboard=True, writes=False)
    log.write(step_record(2, fetched(2), 0.5, with_load=False))
    log.flush()
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and not (tmp_path / "tensorboard").exists()


def test_heat_map_pixels_show_the_load():
    records = [step_record(step, fetched(step), 0.5, with_load=True) for step in range(1, 4)]
    page = report.report_html(records, {}, "", "", "t")
    pictures = [_decode(base64.b64decode(text)) for text in re.findall(r'href="data:image/png;base64,([^"]+)"', page)]
    assert len(pictures) == 2 and pictures[0].shape == (5, 3, 3)  # experts down, records to the right
    for layer, picture in enumerate(pictures):
        load = np.array([record["expert_load"][layer] for record in records]).T
        blue, red = picture[..., 2].astype(int), picture[..., 0].astype(int)
        assert (red[load < 0.9] < 250).all() and (blue[load > 1.1] < 250).all()
        assert (red[load > 1.1] > blue[load > 1.1]).all()


def _decode(png):
    """Pixels of an 8-bit RGB image with unfiltered rows and one IDAT."""
    width, height = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT") + 4
    (size,) = struct.unpack(">I", png[start - 8 : start - 4])
    rows = np.frombuffer(zlib.decompress(png[start : start + size]), np.uint8).reshape(height, 1 + 3 * width)
    assert (rows[:, 0] == 0).all() and zlib.crc32(png[start - 4 : start + size]) == struct.unpack(
        ">I", png[start + size : start + size + 4]
    )[0]
    return rows[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("line", [b"garbage", b"[1]", b'{"a": 1}', b"\xff"])
def test_a_line_that_is_no_record_is_named(line, tmp_path):
    whole = b'{"step": 1, "loss": 2.0, "tokens": 3, "seconds": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + line + b"\n")
    with pytest.raises(MetricsError, match="metrics.jsonl( line 2)? is damaged"):
        MetricLog(tmp_path, finished=2, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole + line + b"\n"
