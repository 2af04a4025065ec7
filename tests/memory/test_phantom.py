"""What travels to the phantom, without one: another process reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from stretto.memory.phantom import _Copied
from stretto.memory.step import WholeStep
from stretto.runtime import SupervisedStep

READ = """
import sys
from pathlib import Path
import cloudpickle, torch
from stretto.memory.step import read
step = read(cloudpickle.loads(Path(sys.argv[1]).read_bytes()).data, "cpu")
out = step.model(input_ids=torch.zeros(2, 8, dtype=torch.long), output_router_logits=True)
print(len(out.router_logits))
"""


@pytest.mark.slow
def test_a_model_of_transformers_still_records_what_its_layers_return(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.SGD(model.parameters())
    step = WholeStep.of(SupervisedStep(model, optimizer, lambda m, x: m(x).logits.mean()))
    file = tmp_path / "step"
    file.write_bytes(cloudpickle.dumps(_Copied(step)))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(file)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n", done.stderr[-2000:]
