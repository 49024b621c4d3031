"""The arithmetic of training, against results by hand and a plain implementation of the equations, with gradients."""

from __future__ import annotations

import math
import random

import pytest

torch = pytest.importorskip("torch")

from memagent_integrations.errors import UsageError  # noqa: E402
from memagent_integrations.training.advantages import advantages, informative, overlong  # noqa: E402
from memagent_integrations.training.losses import Clip, correction, kl, policy_loss, token_loss  # noqa: E402
from memagent_integrations.training.settings import Settings  # noqa: E402

pytestmark = pytest.mark.heavy


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_an_advantage_is_the_distance_from_the_mean_of_the_group() -> None:
    worth = advantages(of(1, 0, 0, 1, 0.5), torch.tensor([7, 7, 7, 2, 2]))
    assert worth.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.25, -0.25])


def test_scaled_advantages_are_in_standard_deviations_of_the_group() -> None:
    worth = advantages(of(1, 0, 3, 3), torch.tensor([0, 0, 1, 1]), scale=True)
    assert worth.tolist() == pytest.approx([0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5), 0, 0])


@pytest.mark.parametrize("reward", [0.1, 0.7])
def test_equal_rewards_are_worth_nothing_though_their_mean_is_not_exact(reward: float) -> None:
    assert advantages(torch.full((16,), reward), torch.zeros(16, dtype=torch.long), scale=True).tolist() == [0] * 16


def test_a_group_of_one_is_worth_nothing() -> None:
    assert advantages(of(1.0), torch.tensor([3]), scale=True).tolist() == [0]


def test_a_group_is_informative_when_its_rewards_differ() -> None:
    assert informative(of(1, 1, 0, 1), torch.tensor([0, 0, 5, 5])).tolist() == [False, False, True, True]


def test_long_replies_lose_reward_in_a_straight_line() -> None:
    assert overlong(of(10, 80, 90, 100, 120), of(100), of(20)).tolist() == pytest.approx([0, 0, -0.5, -1, -1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "held"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # it may not become more than 1.2 times as likely
        (0.5, 2.0, -1.0, False),  # but nothing keeps it from coming back
        (0.5, -2.0, 1.6, True),
        (1.5, -2.0, 3.0, False),
        (4.0, -2.0, 6.0, True),  # three times the advantage at most
    ],
)
def test_the_loss_of_a_token(ratio: float, advantage: float, loss: float, held: bool) -> None:
    new = of(math.log(ratio)).requires_grad_()
    losses, bound = policy_loss(new, of(0.0), of(advantage), Clip(low=0.2, high=0.2, dual=3.0))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([loss])
    assert bound.tolist() == [held]
    assert new.grad.tolist() == pytest.approx([0.0 if held else loss])


def test_the_bounds_may_differ_and_the_third_may_be_missing() -> None:
    assert policy_loss(of(math.log(1.27)), of(0.0), of(1.0), Clip(high=0.28))[0].tolist() == pytest.approx([-1.27])
    assert policy_loss(of(math.log(9.0)), of(0.0), of(-1.0), Clip(dual=math.inf))[0].tolist() == pytest.approx([9.0])


def test_the_divergence_is_never_negative_and_0_where_nothing_changed() -> None:
    assert kl(of(-1.0), of(-1.0)).tolist() == [0]
    assert kl(of(-1.0), of(-1.0 + math.log(2))).tolist() == pytest.approx([2 - math.log(2) - 1])
    assert (kl(torch.randn(1000, dtype=torch.float64), torch.randn(1000, dtype=torch.float64)) >= 0).all()


def test_the_divergence_estimates_that_of_the_distributions() -> None:
    """The mean of k3 over samples of the policy is KL(policy, reference), here of two coins."""
    policy, reference = of(0.3, 0.7), of(0.6, 0.4)
    expected = (policy * kl(policy.log(), reference.log())).sum()
    assert float(expected) == pytest.approx(float((policy * (policy / reference).log()).sum()))


def test_the_correction_is_truncated() -> None:
    assert correction(of(0, 0, 0), of(0, math.log(2), -5), most=2.0).tolist() == pytest.approx([1, 0.5, 2])


def test_differences_without_bounds_stay_finite() -> None:
    new = of(-1e4, 1e4, 0.0).requires_grad_()
    loss, _ = policy_loss(new, of(0.0, 0.0, -1e4), of(1.0, -1.0, -1.0), Clip(dual=math.inf))
    (loss.sum() + kl(new, of(0.0, 0.0, 1e4)).sum()).backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(new.grad).all()


Token = tuple[torch.Tensor, float, float]
"""Log-probabilities under the policy that learns, the one that wrote, and the start."""


def plain(
    group_rewards: list[list[float]], rollouts: list[list[list[list[Token]]]], clip: Clip, beta: float
) -> torch.Tensor:
    """The paper's equation, token by token, for groups of rollouts of conversations of tokens (new, old, reference)."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for rewards, group in zip(group_rewards, rollouts, strict=True):
        mean = sum(rewards) / len(rewards)
        for reward, conversations in zip(rewards, group, strict=True):
            worth = reward - mean
            for conversation in conversations:
                for new, old, reference in conversation:
                    ratio = torch.exp(new - old)
                    clipped = min(
                        max(ratio, torch.tensor(1 - clip.low, dtype=torch.float64)),
                        torch.tensor(1 + clip.high, dtype=torch.float64),
                    )
                    gain = min(ratio * worth, clipped * worth)
                    if worth < 0:
                        gain = max(gain, torch.tensor(clip.dual * worth, dtype=torch.float64))
                    far = torch.exp(reference - new) - (reference - new) - 1
                    total = total + gain - beta * far
                    count += 1
    return -total / count


@pytest.mark.parametrize("seed", range(20))
def test_loss_and_gradients_are_those_of_a_plain_implementation_on_ragged_groups(seed: int) -> None:
    drawn = random.Random(seed)
    clip, beta = (
        Clip(low=drawn.choice([0.1, 0.2]), high=drawn.choice([0.2, 0.28]), dual=3.0),
        drawn.choice([0.0, 1e-3, 0.3]),
    )
    rewards = [
        [float(drawn.choice([0, 0, 1, 0.5])) for _ in range(drawn.randint(2, 6))] for _ in range(drawn.randint(1, 4))
    ]
    leaves: list[torch.Tensor] = []

    def token() -> Token:
        leaves.append(torch.tensor(-drawn.random() * 3, dtype=torch.float64, requires_grad=True))
        return leaves[-1], leaves[-1].item() + drawn.gauss(0, 0.6), leaves[-1].item() + drawn.gauss(0, 0.6)

    rollouts = [
        [[[token() for _ in range(drawn.randint(1, 7))] for _ in range(drawn.randint(1, 5))] for _ in group]
        for group in rewards
    ]
    expected = plain(rewards, rollouts, clip, beta)
    wanted = torch.autograd.grad(expected, leaves)

    worth = advantages(
        of(*(reward for group in rewards for reward in group)),
        torch.tensor([n for n, group in enumerate(rewards) for _ in group]),
    )
    flat = [rollout for group in rollouts for rollout in group]
    tokens = [(one, number) for number, rollout in enumerate(flat) for conversation in rollout for one in conversation]
    new = torch.stack([one[0] for one, _ in tokens])
    old, reference = (of(*(one[column] for one, _ in tokens)) for column in (1, 2))
    loss, _ = token_loss(
        new, old, worth[torch.tensor([number for _, number in tokens])], clip, reference=reference, beta=beta
    )
    total = loss.sum() / len(tokens)
    assert abs((total - expected).item()) < 1e-9
    for gradient, expected_gradient in zip(torch.autograd.grad(total, leaves), wanted, strict=True):
        assert abs(float(gradient - expected_gradient)) < 1e-9


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"group": 1},
        {"updates": 0},
        {"learning_rate": -1.0},
        {"temperature": 0.0},
        {"correction": 2.0, "rescore": False},
        {"correction": 0.5},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"low": 1.5}, {"high": -0.1}, {"dual": 0.5}])
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Clip(**wrong)
