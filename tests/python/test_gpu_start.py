"""The first call on a GPU in a process that has loaded nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from orlop import hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hardware.gpus()["devices"], reason="no GPU"),
]

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def test_engine_in_a_process_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    program = (
        "import sys, numpy, orlop\n"
        "batch = orlop.BatchConfig(micro_batch_size=1, sequence_length=128, accumulation_steps=1)\n"
        "config = orlop.EngineConfig(device='cuda', batch=batch, from_scratch=True)\n"
        "with orlop.Engine.open(sys.argv[1], config) as engine:\n"
        "    ids = numpy.arange(129, dtype=numpy.int32)\n"
        "    print(engine.step([orlop.MicroBatch(ids[:-1], ids[1:])]).loss)\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert 5 < float(run.stdout) < 8  # ln(512) = 6.24
