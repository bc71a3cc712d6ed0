//! A checkpoint in progress beside training: every rank writes its units in the background and reports in
//! each step's message whether it has finished. Once all have, they finish the checkpoint together.

use std::time::Instant;

use serde_json::Value;

use super::TrainError;
use super::setup::Setup;
use super::state::TrainState;
use crate::checkpoint::{self, Contents, Target, Writer};
use crate::comm::Collective;
use crate::engine::Engine;
use crate::lifecycle::protocol::Report;
use crate::train::checkpoint_ref;

/// The checkpoint in progress, if any.
#[derive(Default)]
pub struct Saving(Option<UnderWay>);

struct UnderWay {
    target: Target,
    writer: Writer,
    samples: u64,
    batch: u64,
    state: Value,
    started: Instant,
}

impl Saving {
    /// Whether a checkpoint is in progress.
    pub fn busy(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a checkpoint is in progress and this rank has written its part.
    pub fn written(&self) -> bool {
        self.0.as_ref().is_some_and(|u| u.writer.is_finished())
    }

    /// Takes the snapshot: every rank exports every unit (a collective under sharding) and hands its own
    /// units to the background writer.
    pub fn begin(
        &mut self,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        target: Target,
        state: &TrainState,
    ) -> Result<(), TrainError> {
        let started = Instant::now();
        let writer = Writer::begin(&target, engine.layout(), world.rank(), world.world());
        for unit in 0..engine.layout().units.len() {
            if let Some(exported) = engine.export(unit, writer.owns(unit))? {
                writer.write_unit(unit, exported);
            }
        }
        self.0 = Some(UnderWay {
            target,
            writer,
            samples: state.samples,
            batch: state.controller.batch(),
            state: state.to_json()?,
            started,
        });
        Ok(())
    }

    /// Gives up the checkpoint in progress, if any.
    pub fn abandon(&mut self) {
        if let Some(under_way) = self.0.take() {
            under_way.writer.abandon();
        }
    }

    /// Finishes the checkpoint in progress together with all ranks; returns the report.
    pub fn finish(
        &mut self,
        engine: &dyn Engine,
        world: &dyn Collective,
        setup: &Setup,
    ) -> Result<Option<Report>, TrainError> {
        let Some(done) = self.0.take() else {
            return Ok(None);
        };
        let committed = checkpoint::finish_together(
            done.writer,
            &done.target,
            Contents {
                layout: engine.layout(),
                samples: done.samples,
                state: &done.state,
                config: &setup.model()?.to_json(),
                companions: &setup.companions,
            },
            world,
        )?;
        Ok(Some(Report::Committed {
            checkpoint_ref: checkpoint_ref::with_batch(
                &committed,
                &done.target.run_directory,
                done.batch,
            ),
            seconds: done.started.elapsed().as_secs_f64(),
            bytes: 3 * size_of::<f32>() as u64 * engine.layout().len(),
        }))
    }
}
