"""A residual network on small colour images, with a target ε, a scheduler and momentum.

Written for Opacus in the spirit of its CIFAR-10 example. With `from opacus import PrivacyEngine` it runs there. The images are
made up here, 16 × 16 pixels: stripes of one of five directions, in colours of their own, under noise.
"""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tptopk.integrations.opacus import PrivacyEngine


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


def small_resnet(classes):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Block(16),
        nn.AvgPool2d(2),
        Block(16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def stripes(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count,), generator=generator)
    angle = labels * torch.pi / 5
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    across = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns  # [N, 16, 16]
    shift = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    colours = torch.rand(count, 3, 1, 1, generator=generator)
    images = colours * torch.sin(1.5 * across + shift)[:, None]
    return TensorDataset(images + 0.3 * torch.randn(images.shape, generator=generator), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--max-per-sample-grad-norm", type=float, default=1.0)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader = DataLoader(stripes(args.records, seed=0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(stripes(500, seed=1), batch_size=250)

    model = small_resnet(classes=5)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    print(f"σ = {optimizer.noise_multiplier:.3f}, C = {args.max_per_sample_grad_norm}")
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        model.train()
        for images, target in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(images), target)
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch}: ε = {privacy_engine.get_epsilon(args.delta):.2f} at δ = {args.delta}")

    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == target).sum().item() for images, target in test_loader)
    print(f"test accuracy {right / 500:.3f}")


if __name__ == "__main__":
    main()
