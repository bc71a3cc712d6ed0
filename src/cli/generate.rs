//! `evenkeel generate`: continues texts with a model or with what a run has trained.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use serde_json::json;

use super::output::{self, Format, Unprinted, line, say};
use super::processes::{Asked, DeviceChoice, Gpus};
use super::run_arg;
use crate::data;
use crate::hub::Repo;
use crate::inventory::Inventory;
use crate::launch::generator::{self, Generator, Place};
use crate::launch::{self, LaunchError};
use crate::telemetry::{Display, Event, Mode};
use crate::train::generate::Sampling;
use crate::util::format::count;

/// Continue a text with a model, or with the newest checkpoint of a run.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel generate quickstart --prompt \"12 7 31\"
  evenkeel generate zephyr --prompt \"Why is the sky blue?\" --system \"Be brief.\"
  evenkeel generate Qwen/Qwen2.5-0.5B --text --prompt \"The sky is\"
  evenkeel generate ./model --prompt Hi --temperature 0.7 --seed 1

A model with a chat template answers the prompt as a user's message; --text
makes it continue the prompt as it is. A model that was trained on token ids,
as the quickstart's, takes and gives ids.")]
pub struct Args {
    /// A run, a directory with config.json and weights, or a model of the hub.
    model: String,
    /// The text to continue, or the message to answer. May be repeated.
    #[arg(short, long, required = true, value_name = "TEXT")]
    prompt: Vec<String>,
    /// The system's message before that of the user.
    #[arg(long, value_name = "TEXT", conflicts_with = "text")]
    system: Option<String>,
    /// Answer the prompt as a user's message, by the built-in template if the model has none.
    #[arg(long, conflicts_with = "text")]
    chat: bool,
    /// Continue the prompt as it is, though the model has a chat template.
    #[arg(long)]
    text: bool,
    /// The most new tokens.
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 takes the most probable token each time; 1 draws tokens by their probability.
    #[arg(long, default_value_t = 0.0, value_name = "T", value_parser = temperature)]
    temperature: f64,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0, requires = "temperature")]
    seed: u64,
    /// The tokenizer, unless it is the model's own: a directory, `byte`, or `ids`.
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Branch, tag or commit of a model of the hub.
    #[arg(long)]
    revision: Option<String>,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    output: Format,
}

fn temperature(text: &str) -> Result<f64, &'static str> {
    let value = text.parse().ok();
    let finite = value.filter(|value: &f64| value.is_finite() && *value >= 0.0);
    finite.ok_or("a number from 0 on, for example 0.7")
}

/// What the user names: a directory, a run, or a model of the hub, which is downloaded unless the cache has it.
fn place(name: &str, revision: Option<&str>) -> anyhow::Result<Place> {
    let path = Path::new(name);
    let refuse = |what: &str| match revision {
        Some(_) => {
            bail!("`--revision` selects a model of the hub, and {name} is {what}; remove it")
        }
        None => Ok(()),
    };
    if generator::is_model(path) {
        refuse("a directory")?;
        return Ok(Place::of_directory(path.to_owned())?);
    }
    match run_arg::find(path) {
        Ok(run_dir) => {
            refuse("a run")?;
            run_arg::newest_of(&run_dir)
        }
        Err(_) if data::is_model_on_hub(&launch::base()?, name) => {
            let repo = Repo::model(name, revision);
            let mut display = Display::new(Mode::detect());
            // An interrupted download continues next time.
            let downloaded = generator::snapshot(&repo, &|| false, &mut |received| {
                display.event(&Event::Preparing {
                    what: format!("downloading {name}"),
                    done: received.bytes,
                    total: received.total,
                });
            });
            drop(display);
            match downloaded {
                Ok(directory) => Ok(Place::of_directory(directory)?),
                Err(LaunchError::Hub(error)) => bail!(
                    "{name} is neither a run nor a directory here, and {error}\n  {}\n  evenkeel generate {} …",
                    repo.download_command(Some(repo.name())),
                    repo.name()
                ),
                Err(error) => Err(error.into()),
            }
        }
        Err(_) if path.is_dir() => bail!(
            "{name} is neither a run nor a model: it has no config.json; `evenkeel list` lists the runs"
        ),
        Err(error) => Err(error),
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let place = place(&args.model, args.revision.as_deref())?;
    let place = Place {
        tokenizer: args.tokenizer.clone().or(place.tokenizer),
        ..place
    };
    let asked = Asked {
        procs: Some(1),
        world: None,
        device: args.device,
    };
    let processes = asked.built_in(Gpus::of(&Inventory::discover(), args.device))?;
    if let Some(note) = &processes.note {
        say(format_args!("note: {note}\n"));
    }
    let (mut generator, prompter) = Generator::open(&place, processes.device)?;
    let is_chat = args.chat || args.system.is_some() || (prompter.has_template() && !args.text);
    if is_chat && !prompter.has_template() {
        say(format_args!(
            "note: the model has no chat template; this is the built-in one\n"
        ));
    }
    let sampling = Sampling {
        max_tokens: args.max_tokens as usize,
        temperature: args.temperature,
        seed: args.seed,
    };
    let mut answers = Vec::new();
    for text in &args.prompt {
        let prompt = match is_chat {
            true => prompter.chat(args.system.as_deref(), text)?,
            false => prompter.text(text)?,
        };
        let is_text = args.output == Format::Text;
        if is_text && args.prompt.len() > 1 {
            line(format_args!("> {text}"))?;
        }
        let begun = Instant::now();
        let mut unprinted: Option<Unprinted> = None;
        let mut shown = 0;
        let tokens = generator.continued(&prompt, sampling, &mut |tokens| {
            if is_text {
                let text = prompter.added(&prompt, tokens);
                // A character that is cut is shown when it is whole.
                let whole = text.trim_end_matches('\u{fffd}');
                unprinted = output::print_as_is(whole.get(shown..).unwrap_or_default()).err();
                shown = shown.max(whole.len());
            }
            unprinted.is_none()
        })?;
        if let Some(unprinted) = unprinted {
            bail!(unprinted);
        }
        let seconds = begun.elapsed().as_secs_f64();
        if is_text {
            line("")?;
            let rate = tokens.len() as f64 / seconds.max(1e-9);
            let (new, positions) = (tokens.len(), generator.positions());
            let cut = match new {
                _ if new == sampling.max_tokens => format!(", cut by --max-tokens {new}"),
                _ if prompt.len() + new == positions => {
                    format!(", cut by the model's {positions} positions")
                }
                _ => String::new(),
            };
            say(format_args!(
                "{} after {} of the prompt{cut}; {rate:.1} tokens/s\n",
                count(new as u64, "token"),
                prompt.len(),
            ));
        }
        answers.push(json!({
            "prompt": text,
            "text": prompter.added(&prompt, &tokens),
            "promptTokens": prompt,
            "tokens": tokens,
            "seconds": seconds,
        }));
    }
    if args.output != Format::Text {
        args.output.print(&answers)?;
    }
    Ok(ExitCode::SUCCESS)
}
