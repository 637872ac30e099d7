"""Ranks eight (batch, learning rate) settings on four tasks by goodput, and by the measured time to a target loss.

`python benchmarks/time_to_target.py [TASK ...]`: for each task the noise scale is measured by a probe at the baseline's
batch, which with the step times gives the predicted time to the loss that the baseline reaches after a fixed number of
samples. Each setting is trained until its loss, averaged over equal data, gets there. Kendall's tau between the two, in
`results/time_to_target.json`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
from common import RESULTS, complete, engine, request_of, write
from gate import MODEL, TASKS
from scipy.stats import kendalltau

from autotune.executors.local import LocalExecutor
from autotune.scoring.convergence.learning_rate import LearningRate
from autotune.scoring.convergence.noise_scale import efficiency, noise_scale_of
from autotune.space.candidate import Candidate
from autotune.trial.result import TrialResult

BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)
BASELINE, SAMPLES, WINDOW, MARGIN = 64, 24576, 4096, 1.6
RULES = {"transformer, Adam": "sqrt", "net, SGD": "linear", "regression, Adam": "sqrt", "digits CNN, SGD": "linear"}
OWN = {
    "regression, Adam": """
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
def data():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16384, 24, generator=draw)
    y = torch.sin(x[:, :4]).sum(1) + x[:, 4] * x[:, 5] + 0.5 * torch.randn(16384, generator=draw)
    return TensorDataset(x, y)
def plain_loss(model, batch):
    return F.mse_loss(model(batch[0])[:, 0], batch[1])
def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3 * RATE)
""",
    "digits CNN, SGD": """
from sklearn.datasets import load_digits
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(384, 10),
        )
def data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    draw = torch.Generator().manual_seed(0)
    # Eight noisy copies of each, so that the loss does not go to nothing on images learned by heart.
    return TensorDataset(
        torch.cat([images + torch.randn(images.shape, generator=draw) for _ in range(8)]), torch.tensor(digits.target).repeat(8)
    )
def plain_loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05 * RATE, momentum=0.9)
""",
}
RATES = {"net, SGD": 0.2, "transformer, Adam": 1.0, "regression, Adam": 1.0, "digits CNN, SGD": 0.2}


class Task:
    """One model under eight settings."""

    def __init__(self, name: str, executor: LocalExecutor, folder: Path) -> None:
        self.name, self.executor, self.folder = name, executor, folder
        folder.mkdir()
        self.target = folder / "model.py"
        self.target.write_text(MODEL.format(task=(TASKS | OWN)[name], rate=RATES[name], scale=1.0, sign=False))

    def run(self, batch: int, max_steps: int, label: str, **what: object) -> TrialResult:
        steps = 8 if what.get("noise") else 1
        candidate = Candidate(micro_batch_size=batch // steps, gradient_accumulation_steps=steps)
        rate = LearningRate(rule=RULES[self.name], baseline_batch=BASELINE)
        request = request_of(
            self.target,
            candidate,
            max_steps=max_steps,
            min_samples=10**12,
            budget_s=250.0,
            learning_rate_factor=rate.factor(batch),
            **what,
        )
        return complete(self.executor, self.folder / f"{label}-{batch}", request)

    def measure(self) -> dict[str, object]:
        probe = self.run(BASELINE, 400, "noise", noise=True)
        noise = noise_scale_of(probe.noise)
        target = smoothed(self.run(BASELINE, SAMPLES // BASELINE, "target"), BASELINE)[1][-1]
        rows = []
        for batch in BATCHES:
            wanted = SAMPLES / efficiency(noise.samples, batch, BASELINE)
            result = self.run(batch, math.ceil(MARGIN * wanted / batch), "train")
            at, loss = smoothed(result, batch)
            below = np.flatnonzero(loss <= target)
            needed = float(at[below[0]]) if len(below) else math.inf
            step_s = result.steps.median_s
            seconds = {"predicted_s": wanted / batch * step_s, "measured_s": needed / batch * step_s}
            rows.append({"batch": batch, "step_s": step_s, **seconds})
            print(self.name, rows[-1], flush=True)
        # What never got there comes last.
        tau = kendalltau([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows]).statistic
        best = sorted(rows, key=lambda row: row["predicted_s"])[0]["batch"]
        order = [row["batch"] for row in sorted(rows, key=lambda row: row["measured_s"])]
        for row in rows:
            row["measured_s"] = row["measured_s"] if math.isfinite(row["measured_s"]) else None
        return {
            "noise_scale": str(noise), "target_loss": float(target), "kendall_tau": float(tau), "best_predicted": best,
            "its_rank_measured": order.index(best) + 1, "settings": rows,
        }  # fmt: skip


def smoothed(result: TrialResult, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples trained on, and the mean loss over the last WINDOW of them."""
    n = max(1, WINDOW // batch)
    losses = np.array(result.losses, dtype=float)
    mean = np.convolve(losses, np.ones(n) / n, mode="valid")
    return np.arange(n, len(losses) + 1) * float(batch), mean


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # models so small that a second thread only waits
    path = RESULTS / "time_to_target.json"
    figures = json.loads(path.read_text()) if path.exists() else {}
    figures.pop("measured_on", None)
    with engine("torch") as (executor, folder):
        for i, task in enumerate(sys.argv[1:] or RULES):
            figures[task] = Task(task, executor, folder / str(i)).measure()
            write("time_to_target", figures)


if __name__ == "__main__":
    main()
