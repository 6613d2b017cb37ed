"""grpo.py's own functions, in float64: closed-form numbers, gradients, and what must not happen."""

import math

import pytest
import torch

from grpo import aggregate, group_advantages, k3_kl, token_loss

torch.set_default_dtype(torch.float32)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("rewards, normalize, expected", [
    ([1, 0, 0, 0], True, [1.4997, -.4999, -.4999, -.4999]),
    ([1, 0, 0, 0], False, [.75, -.25, -.25, -.25]),
    ([1, 1, 0, 0], True, [.865875, .865875, -.865875, -.865875]),
])
def test_group_advantages(rewards, normalize, expected):
    torch.testing.assert_close(group_advantages(t(rewards), normalize), t(expected), atol=5e-5, rtol=0)


def test_three_of_eight_correct():
    advantages = group_advantages(t([1, 1, 1, 0, 0, 0, 0, 0]))[0]
    assert advantages[0].item() == pytest.approx(1.2076, abs=3e-4)
    assert advantages[-1].item() == pytest.approx(-.7246, abs=3e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(value, dtype):
    assert (group_advantages(torch.full((3, 8), value, dtype=dtype)) == 0).all()


def test_advantages_are_bounded_and_never_nan():
    advantages = group_advantages(t([.35] * 7 + [0], [0] * 7 + [1]))
    assert advantages.abs().max() < math.sqrt(8)
    assert (group_advantages(torch.ones(2, 1)) == 0).all()      # a group of one has nothing to compare with


def test_each_group_is_judged_by_itself():
    torch.testing.assert_close(group_advantages(t([1, 0], [5, 4]), normalize_std=False), t([.5, -.5], [.5, -.5]))


@pytest.mark.parametrize("ratio, advantage, loss, has_gradient", [
    (1.5, 1, -1.28, False), (.5, 1, -.5, True), (1.5, -1, 1.5, True), (.5, -1, .8, False), (1.25, 1, -1.25, True),
    (5, -1, 5, True), (2, -1, 2, True),
])
def test_clipping(ratio, advantage, loss, has_gradient):
    logp = t([math.log(ratio)]).requires_grad_()
    value = token_loss(logp, t([0.0]), t(advantage), .2, .28)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert (logp.grad.item() != 0) == has_gradient


@pytest.mark.parametrize("ref, expected", [(-1, 0), (-1.5, .106531), (-.5, .148721), (-2, .367879)])
def test_k3(ref, expected):
    assert k3_kl(t([-1.0]), t([float(ref)])).item() == pytest.approx(expected, abs=1e-6)


def test_k3_pulls_towards_the_reference():
    logp = t([-1.0]).requires_grad_()
    k3_kl(logp, t([-2.0])).sum().backward()
    assert logp.grad.item() > 0         # descending the penalty lowers a log-probability above the reference's


def test_the_three_aggregations_differ():
    mask = torch.zeros(2, 8, dtype=torch.float64)
    mask[0, :2] = mask[1, :8] = 1
    loss = token_loss(torch.zeros(2, 8).double(), torch.zeros(2, 8).double(), t(1, -1))
    assert aggregate(loss, mask, "sequence", 2).item() == pytest.approx(0)
    assert aggregate(loss, mask, "token", 10).item() == pytest.approx(.6)
    assert aggregate(loss, mask, "constant", 2 * 16).item() == pytest.approx(.1875)


def test_on_policy_the_value_is_zero_and_the_gradient_is_not():
    logp = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    advantages = group_advantages(t([1, 0, 0, 0]))[0]
    loss = aggregate(token_loss(logp, logp.detach(), advantages), torch.ones(4, 5).double(), "token", 20)
    loss.backward()
    assert abs(loss.item()) < 1e-12
    torch.testing.assert_close(logp.grad, -advantages[:, None].expand(4, 5) / 20)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_the_token_mean_does_not_depend_on_the_split(split):
    loss, mask = t([1, 0, 0], [0, 0, 0]), t([1, 0, 0], [1, 1, 1])
    assert sum(aggregate(loss[rows], mask[rows], "token", 4) for rows in split).item() == .25


def test_nothing_counted_gives_zero_and_finite_gradients():
    logp = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for how in ("token", "sequence", "constant"):
        loss = aggregate(token_loss(logp, logp.detach(), t(1, -1)), torch.zeros(2, 3).double(), how, 1)
        loss.backward()
        assert loss.item() == 0 and logp.grad.isfinite().all() and (logp.grad == 0).all()


def test_masked_tokens_leave_numerator_and_denominator():
    mask = t([0, 0, 1, 1, 1])
    assert aggregate(torch.ones(1, 5).double(), mask, "token", mask.sum()).item() == 1.0
