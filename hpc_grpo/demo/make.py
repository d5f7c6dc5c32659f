"""Write the demo's FOLDER/model and FOLDER/{train,eval,sft}.jsonl: `python -m hpc_grpo.demo.make FOLDER`."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_grpo.demo.tasks import TaskSizes, write_tasks


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Decides the problems, the slips and the initial weights.")
@click.option("--hidden-size", default=128, show_default=True)
@click.option("--layers", default=3, show_default=True)
@click.option("--heads", default=4, show_default=True)
@click.option("--untied", is_flag=True, help="Give the output layer weights of its own.")
@click.option("--num-train", default=TaskSizes.num_train, show_default=True)
@click.option("--num-eval", default=TaskSizes.num_eval, show_default=True)
@click.option("--num-sft", default=TaskSizes.num_sft, show_default=True)
def main(
    folder: Path,
    seed: int,
    hidden_size: int,
    layers: int,
    heads: int,
    untied: bool,
    num_train: int,
    num_eval: int,
    num_sft: int,
) -> None:
    """Create the demo's model and task sets below FOLDER."""
    # Imported here so that --help and a mistyped option answer without loading torch.
    from hpc_grpo.demo.model import ModelSize, write_model

    write_tasks(folder, TaskSizes(num_train=num_train, num_eval=num_eval, num_sft=num_sft), seed)
    size = ModelSize(hidden_size=hidden_size, num_layers=layers, num_heads=heads, tie_embeddings=not untied)
    num_parameters = write_model(folder / "model", size, seed)
    click.echo(
        f"{folder}: a model of {num_parameters:,} parameters, "
        f"{num_train} train, {num_eval} eval and {num_sft} sft items"
    )


if __name__ == "__main__":
    main()
