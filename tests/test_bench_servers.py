"""Server engines against a stand-in on this machine that answers as SGLang and vLLM are documented to."""

from __future__ import annotations

import io
import json
import shlex
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from bench_models import checkpoint, new_drafter
from rich.console import Console

from dpace_cli import bench
from dpace_cli.config import Config, TargetConfig
from dpace_cli.engines.measure_servers import spec_decode_counters
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.target import load_target
from dpace_cli.records import checkpoint_ref
from dpace_cli.results import BenchRecord

PROMPTS = [{"id": "a", "prompt": "One?"}, {"id": "b", "turns": ["Two?", "And?"]}, {"id": "c", "prompt": "Three?"}]


class StandIn:
    """An OpenAI-compatible server of one kind, that says what it is told to and remembers what it was asked."""

    def __init__(self, kind: str, speculates: bool, delay_s: float = 0.0) -> None:
        self.kind, self.speculates, self.delay_s = kind, speculates, delay_s
        self.asked: list[dict] = []
        self.fail: dict[str, int] = {}
        self.drafts = self.accepted = 0
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def page(self, path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"object": "list", "data": [{"id": "served-name", "object": "model"}]})
        if path == "/server_info" and self.kind == "sglang":
            algorithm = "DFLASH" if self.speculates else None
            return 200, json.dumps({"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 6,
                                    "model_path": "t"})  # fmt: skip
        if path == "/metrics" and self.kind == "vllm":
            lines = ['vllm:num_requests_running{engine="0"} 0.0']
            if self.speculates:
                lines += [
                    "# TYPE vllm:spec_decode_num_drafts_total counter",
                    f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {1000 + self.drafts}.0',
                    f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {7000 + self.accepted}.0',
                    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} '
                    f"{900.0 + self.drafts}",
                    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} '
                    f"{800.0 + self.accepted - self.drafts}",
                ]
            return 200, "\n".join(lines) + "\n"
        return 404, json.dumps({"error": {"message": "not here"}})

    def complete(self, body: dict) -> tuple[int, str]:
        text = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(body)
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        time.sleep(self.delay_s)
        with self.lock:
            self.busy -= 1
        if text in self.fail:
            return self.fail[text], json.dumps({"error": {"message": f"refused: {text}"}})
        tokens = 9 + len(text)
        choice = {"index": 0, "finish_reason": "length" if text == "Three?" else "stop",
                  "message": {"role": "assistant", "content": f"You said {text}"}}  # fmt: skip
        if self.kind == "sglang" and self.speculates and body.get("return_meta_info"):
            choice["meta_info"] = {"spec_verify_ct": 4, "spec_accept_length": tokens / 4, "completion_tokens": tokens}
        with self.lock:
            self.drafts, self.accepted = self.drafts + 2, self.accepted + 3
        return 200, json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
                                "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": tokens,
                                                               "total_tokens": tokens + 5}})  # fmt: skip

    def handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(*stand_in.page(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send(*stand_in.complete(body))

            def send(self, status: int, text: str) -> None:
                payload = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture(scope="module")
def refs(tmp_path_factory, tiny_target):
    folder = tmp_path_factory.mktemp("run") / "train" / "dpace-seed0" / "step-000010"
    return [checkpoint_ref(checkpoint(folder, new_drafter(load_target(TargetConfig(path=str(tiny_target))))))]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return {"datasets": [str(path)], "max_new_tokens": 32, "warmup_tokens": 4, "timeout_s": 5}


def run(settings, refs, folder, **more):
    return bench.run(Config.model_validate({"bench": {**settings, **more}}), refs, folder)


def test_sglang_tells_steps_and_acceptance_of_each_answer(settings, refs, tmp_path):
    with StandIn("sglang", True) as draft, StandIn("sglang", False, delay_s=0.02) as baseline:
        result = run(settings, refs, tmp_path / "bench", engine="sglang", base_url=draft.url,
                     baseline_url=baseline.url + "/v1/")  # fmt: skip
    record = BenchRecord.load(result.result)
    assert result.result.name == "mine-t0-sglang-c1.json" and record.engine == "sglang"
    tokens = [9 + len(t) for t in ("One?", "Two?", "And?", "Three?")]
    assert sorted(p.draft.tokens for p in record.prompts) == sorted(tokens)
    assert record.tau == pytest.approx(sum(n / 4 for n in tokens) / 4)
    assert record.tau_pooled == pytest.approx(sum(tokens) / 16) and record.rounds == 16
    assert record.sr > 1 and record.lossless == 1.0 and record.broken == 0
    assert set(record.throughput) == {"baseline", "draft"}
    assert {p.draft.finish_reason for p in record.prompts if p.id == "c"} == {"length"}
    timed = [body for body in draft.asked if body["max_tokens"] == 32]
    assert len(timed) == 4 and all(body["return_meta_info"] and body["model"] == "served-name" for body in timed)
    assert [m["content"] for m in max((b["messages"] for b in timed), key=len)] == ["Two?", "You said Two?", "And?"]
    assert len([b for b in draft.asked if b["max_tokens"] == 4]) == 1, "a warm-up that is not counted"


def test_vllm_counts_over_all_requests(settings, refs, tmp_path):
    with StandIn("vllm", True) as draft, StandIn("vllm", False) as baseline:
        result = run(settings, refs, tmp_path / "bench", engine="vllm", base_url=draft.url, baseline_url=baseline.url)
    record = BenchRecord.load(result.result)
    assert record.tau is None and record.tau_pooled == pytest.approx(1 + 3 / 2)
    assert record.counters == {"requests": 4, "drafts": 8, "accepted": 12, "accepted_per_position": [8, 4]}
    assert all("return_meta_info" not in body for body in draft.asked)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_one_server_alone_claims_no_speed_up(settings, refs, tmp_path, engine):
    with StandIn(engine, True) as server:
        fast = run(settings, refs, tmp_path / "fast", engine=engine, base_url=server.url)
        assert fast.sr is None and fast.lossless is None and fast.tau_pooled is not None
    with StandIn(engine, False) as server:
        slow = BenchRecord.load(run(settings, refs, tmp_path / "slow", engine=engine, baseline_url=server.url).result)
        assert (slow.sr, slow.tau, slow.tau_pooled, slow.rounds) == (None, None, None, None)
        assert len(slow.finished) == 4 and slow.throughput["baseline"] > 0


def test_each_concurrency_is_a_record_with_that_many_in_flight(settings, refs, tmp_path):
    with StandIn("sglang", True, delay_s=0.05) as server:
        result = run(settings, refs, tmp_path / "bench", engine="sglang", base_url=server.url, concurrency=[1, 3])
        assert server.most_busy == 3
    assert [line.concurrency for line in result.results] == [1, 3]
    one, three = (BenchRecord.load(line.result) for line in result.results)
    assert three.wall_s["draft"] < one.wall_s["draft"]


def test_the_template_options_and_the_sampling_are_sent(settings, refs, tmp_path):
    with StandIn("sglang", True) as server:
        config = Config.model_validate({
            "target": {"enable_thinking": False},
            "bench": {**settings, "engine": "sglang", "base_url": server.url, "temperatures": [0.7], "top_p": 0.9,
                      "top_k": 20},
        })  # fmt: skip
        record = BenchRecord.load(bench.run(config, refs, tmp_path / "bench").result)
        body = server.asked[-1]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 20)
    assert body["chat_template_kwargs"] == record.template_options == {"enable_thinking": False}
    seeds = [body["seed"] for body in server.asked if body["max_tokens"] == 32]
    assert len(set(seeds)) == 4 and record.lossless is None


def test_a_refused_prompt_is_reported_and_the_others_count(settings, refs, tmp_path):
    with StandIn("sglang", True) as server:
        server.fail = {"Two?": 400}
        result = run(settings, refs, tmp_path / "bench", engine="sglang", base_url=server.url, warmup_tokens=0)
    record = BenchRecord.load(result.result)
    assert {p.id for p in record.prompts if not p.finished} == {"b"} and len(record.finished) == 2
    assert "400 " in record.prompts[[p.id for p in record.prompts].index("b")].error
    assert result.results[0].errors == 2, "without the first turn there is no second"


@pytest.mark.parametrize(("status", "hint"), [(401, "OPENAI_API_KEY"), (404, "target.path"), (422, "bench.engine")])
def test_a_refusal_of_every_request_ends_the_bench(settings, refs, tmp_path, status, hint):
    with StandIn("sglang", True) as server:
        server.fail = {"One?": status, "Two?": status, "Three?": status}
        with pytest.raises(RunError) as caught:
            run(settings, refs, tmp_path / "bench", engine="sglang", base_url=server.url)
    assert f"{status} " in caught.value.message and "refused: " in caught.value.message
    assert hint in caught.value.hint
    assert not list((tmp_path / "bench").rglob("*.json"))


def test_a_slow_server_times_out_by_prompt(settings, refs, tmp_path):
    with StandIn("sglang", True, delay_s=0.5) as server, pytest.raises(RunError, match=r"no answer within 0\.1 s"):
        run(settings, refs, tmp_path / "bench", engine="sglang", base_url=server.url, timeout_s=0.1, warmup_tokens=0)


def test_an_unreachable_server_is_one_clear_error(settings, refs, tmp_path):
    with StandIn("vllm", True) as server:
        url = server.url
    with pytest.raises(RunError, match="cannot be reached") as caught:
        run(settings, refs, tmp_path / "bench", engine="vllm", base_url=url)
    assert url in caught.value.message and "--dry-run" in caught.value.hint
    with pytest.raises(UsageError, match="none is named"):
        run(settings, refs, tmp_path / "bench", engine="vllm")
    with pytest.raises(UsageError, match="one drafter, and 2"):
        run(settings, [refs[0], replace(refs[0], step=11)], tmp_path / "bench", engine="vllm", base_url=url)


def test_a_broken_off_bench_resumes_and_a_finished_one_is_kept(settings, refs, tmp_path):
    with StandIn("vllm", True) as draft, StandIn("vllm", False) as baseline:
        options = {"engine": "vllm", "base_url": draft.url, "baseline_url": baseline.url, "warmup_tokens": 0}
        draft.fail = {"Three?": 404}
        with pytest.raises(RunError):
            run(settings, refs, tmp_path / "bench", **options)
        answered = len(draft.asked) - 1
        assert len(baseline.asked) == 4
        draft.fail = {}
        result = run(settings, refs, tmp_path / "bench", **options)
        assert len(baseline.asked) == 4 and len(draft.asked) == answered + 1 + (4 - answered)
        assert len(BenchRecord.load(result.result).finished) == 4
        assert run(settings, refs, tmp_path / "bench", **options) == result
        assert len(baseline.asked) == 4


def test_servers_that_are_not_what_they_should_be_are_named(settings, refs, tmp_path, capsys):
    with StandIn("sglang", False) as draft, StandIn("vllm", True) as baseline:
        run(settings, refs, tmp_path / "bench", engine="sglang", base_url=draft.url, baseline_url=baseline.url,
            block_size=4)  # fmt: skip
    said = " ".join(capsys.readouterr().err.split())
    assert "does not speculate" in said and "baseline server" in said and "speculates" in said
    assert "drafts blocks of 6, the checkpoint 4" in said and "told nothing about acceptance" in said


def test_the_prometheus_page_is_read_with_and_without_the_ending_and_summed_over_engines():
    page = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1"} 5.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 99.0
vllm:spec_decode_num_accepted_tokens{engine="0"} 2e1
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="11"} 7.0
"""
    assert spec_decode_counters(page) == {"drafts": 15.0, "accepted": 20.0, "accepted@1": 13.0, "accepted@12": 7.0}
    assert spec_decode_counters("vllm:num_requests_running 0") is None


def test_the_launch_commands_count_draft_tokens_as_each_server_does(refs):
    config = Config.model_validate({"target": {"path": "Qwen/Qwen3-4B", "dtype": "bfloat16", "revision": "abc"}})
    plan = bench.launch_commands(config, refs)
    [found] = plan.commands
    path = str(refs[0].path)
    sglang, vllm = shlex.split(found.sglang), shlex.split(found.vllm)
    assert sglang[:3] == ["python", "-m", "sglang.launch_server"]
    pairs = dict(zip(sglang[3::2], sglang[4::2]))
    assert pairs["--speculative-algorithm"] == "DFLASH" and pairs["--speculative-draft-model-path"] == path
    assert pairs["--speculative-num-draft-tokens"] == "6" and pairs["--revision"] == "abc"
    assert vllm[:3] == ["vllm", "serve", "Qwen/Qwen3-4B"]
    speculation = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert speculation == {"method": "dflash", "model": path, "num_speculative_tokens": 5}
    assert "speculative" not in found.sglang_baseline + found.vllm_baseline
    assert "--dtype bfloat16" in found.sglang_baseline
    out = Console(width=40, file=io.StringIO())
    out.print(plan)
    lines = out.file.getvalue().splitlines()
    assert {found.sglang, found.sglang_baseline, found.vllm, found.vllm_baseline} <= set(lines), "whole, to be copied"


def test_both_servers_are_asked_the_same_later_turns(settings, refs, tmp_path):
    """The baseline's answers go into the drafter's next turn, also where its own were others: prompts are paired."""
    with StandIn("sglang", True) as draft, StandIn("sglang", False) as baseline:
        for server, name in ((draft, "draft"), (baseline, "baseline")):
            complete = server.complete

            def named(body, complete=complete, name=name):
                status, text = complete(body)
                return status, text.replace("You said", f"The {name} heard")

            server.complete = named
        path = tmp_path / "long.jsonl"
        path.write_text(json.dumps({"id": "a", "turns": ["One?", "Two?", "Three?"]}) + "\n")
        result = run({**settings, "datasets": [str(path)]}, refs, tmp_path / "bench", engine="sglang",
                     base_url=draft.url, baseline_url=baseline.url, warmup_tokens=0)  # fmt: skip
    assert [body["messages"] for body in draft.asked] == [body["messages"] for body in baseline.asked]
    said = [message["content"] for message in draft.asked[-1]["messages"]]
    assert said == ["One?", "The baseline heard One?", "Two?", "The baseline heard Two?", "Three?"]
    assert BenchRecord.load(result.result).lossless == 0.0


def test_the_warm_up_is_in_no_time(settings, refs, tmp_path):
    with StandIn("sglang", True) as server:
        complete = server.complete

        def slow_at_first(body):
            time.sleep(5.0 if body["max_tokens"] == 4 else 0.0)
            return complete(body)

        server.complete = slow_at_first
        record = BenchRecord.load(run(settings, refs, tmp_path / "x", engine="sglang", base_url=server.url).result)
    assert len([body for body in server.asked if body["max_tokens"] == 4]) == 1
    assert record.wall_s["draft"] < 5.0 and record.seconds < 5.0
    assert sum(p.draft.decode_s for p in record.prompts) < 5.0
