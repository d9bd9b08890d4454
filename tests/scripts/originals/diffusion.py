"""Trains a small UNet to draw pieces of a photograph, by Diffusers and accelerate, and keeps averaged weights."""

import torch
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from matplotlib.cbook import get_sample_data
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

SIDE, EPOCHS, ACCUMULATION = 16, 4, 4

augment = transforms.Compose(
    [
        transforms.Resize(SIDE + 4),
        transforms.RandomCrop(SIDE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.5], [0.5]),
    ]
)


class Pieces(Dataset):
    """Of the photograph that matplotlib has among its samples."""

    def __init__(self, side=32):
        photograph = Image.open(get_sample_data("grace_hopper.jpg")).convert("RGB")
        corners = [(x, y) for y in range(0, 576, side) for x in range(0, 512, side)]
        self.pieces = [photograph.crop((x, y, x + side, y + side)) for x, y in corners]

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"images": augment(self.pieces[index])}


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = UNet2DModel(
        sample_size=SIDE,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    average = EMAModel(
        model.parameters(),
        decay=0.9999,
        use_ema_warmup=True,
        power=0.75,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.95, 0.999), weight_decay=1e-6)
    loader = DataLoader(Pieces(), batch_size=4, shuffle=True)
    steps = EPOCHS * (len(loader) // ACCUMULATION)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=5, num_training_steps=steps)

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    total, last = 0.0, 0.0
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            images = batch["images"]
            noise = torch.randn_like(images)
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(images),))
            noisy = noise_scheduler.add_noise(images, noise, timesteps)
            with accelerator.accumulate(model):
                predicted = model(noisy, timesteps).sample
                loss = functional.mse_loss(predicted, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item() / ACCUMULATION
            if accelerator.sync_gradients:
                average.step(model.parameters())
                last, total = total, 0.0
    print(f"loss {last:.6f}")

    if accelerator.is_main_process:
        unet = accelerator.unwrap_model(model)
        average.copy_to(unet.parameters())
        pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
        drawn = pipeline(batch_size=4, generator=torch.Generator().manual_seed(0), num_inference_steps=20)
        drawn.images[0].save("drawn.png")
        pipeline.save_pretrained("pieces")


if __name__ == "__main__":
    main()
