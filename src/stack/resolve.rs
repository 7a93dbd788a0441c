//! What can be said of a request only with the fleet at hand: which model, what
//! a rank must be able to do, whether the prompt fits. Nothing of it is ever
//! stored as a failure, since a fleet changes.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use tower::Service;

use super::{
    Parts,
    admission::Admission,
    counters::Counters,
    idempotency::{Samples, Work},
};
use crate::{
    call::{Prompt, SampleCall, SampleParams},
    error::{Error, Reason, Violation},
    fleet::{
        Fleet,
        snapshot::{RankView, Snapshot},
    },
    routing::{Lack, Needs},
};

/// Work whose model is known and that some rank can do. Only [`Resolve`] makes
/// one.
#[derive(Clone)]
pub struct ResolvedWork {
    /// The work.
    pub work: Work,
    /// What a rank must be able to do.
    pub needs: Arc<Needs>,
}

/// The layer.
#[derive(Clone)]
pub struct Resolve<S> {
    inner: S,
    fleet: Arc<Fleet>,
    admission: Arc<Admission>,
    counters: Arc<Counters>,
}

impl<S> Resolve<S> {
    /// Before `inner`.
    pub fn new(inner: S, parts: &Parts) -> Self {
        Self {
            inner,
            fleet: Arc::clone(&parts.fleet),
            admission: Arc::clone(&parts.admission),
            counters: Arc::clone(&parts.counters),
        }
    }
}

impl<S> Service<Work> for Resolve<S>
where
    S: Service<ResolvedWork, Response = Samples, Error = Error> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Samples;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Samples, Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, work: Work) -> Self::Future {
        let fleet = Arc::clone(&self.fleet);
        let (admission, counters) = (Arc::clone(&self.admission), Arc::clone(&self.counters));
        let mut inner = self.inner.clone();
        Box::pin(async move {
            let params = work.call.params();
            let mut changes = fleet.changes();
            // What waits here stands in no queue, but its prompt is held all the same.
            let mut parked = None;
            let needs = loop {
                match resolve(&fleet.snapshot(), work.call.call()) {
                    Err(error)
                        if error.reason == Reason::WeightsNotServed && params.weights.wait =>
                    {
                        if parked.is_none() {
                            parked = Some(admission.park(&work, &counters)?);
                        }
                        let changed = changes.changed();
                        if work.generation.unless_stopped(changed).await?.is_err() {
                            return Err(error);
                        }
                    }
                    resolved => break resolved?,
                }
            };
            drop(parked);
            inner
                .call(ResolvedWork {
                    work,
                    needs: Arc::new(needs),
                })
                .await
        })
    }
}

/// What a rank must be able to do for this request, if some rank of the fleet is.
///
/// # Errors
/// As the table of reasons says; all violations of a kind at once.
pub fn resolve(fleet: &Snapshot, call: &SampleCall) -> Result<Needs, Error> {
    let params = &call.params;
    let model = model(fleet, params.model.as_deref())?;
    let needs = needs(call, Arc::clone(&model));
    let ranks: Vec<&RankView> = fleet
        .models
        .get(&model)
        .map(|m| m.ranks.iter().map(|&i| &fleet.ranks[i]).collect())
        .unwrap_or_default();

    let mut violations = Vec::new();
    vocabulary(&ranks, params, &mut violations);
    let out_of_vocabulary = !violations.is_empty();
    length(&ranks, params, &needs, &mut violations);
    if !violations.is_empty() {
        let reason = if out_of_vocabulary {
            Reason::TokenOutOfVocabulary
        } else {
            Reason::PromptTooLong
        };
        return Err(Error::invalid(reason, violations));
    }
    capabilities(&ranks, &needs)?;
    weights(&ranks, &needs)?;
    Ok(needs)
}

/// What a rank would have to be able to do for this request, whether any is or not.
///
/// # Errors
/// As [`model`].
pub fn wanted(fleet: &Snapshot, call: &SampleCall) -> Result<Needs, Error> {
    let model = model(fleet, call.params.model.as_deref())?;
    Ok(needs(call, model))
}

/// The model that is meant.
///
/// # Errors
/// MODEL_NOT_FOUND, MODEL_AMBIGUOUS, NO_REPLICA.
pub fn model(fleet: &Snapshot, named: Option<&str>) -> Result<Arc<str>, Error> {
    let mut served: Vec<&Arc<str>> = fleet.models.keys().collect();
    served.sort();
    match named {
        Some(model) => match fleet.models.get_key_value(model) {
            Some((model, _)) => Ok(Arc::clone(model)),
            None if served.is_empty() || fleet.lost_models.contains(model) => Err(no_replica()),
            None => Err(Error::new(
                Reason::ModelNotFound,
                format!(
                    "no replica serves this model; served: {}",
                    list(served.iter().map(|m| &***m))
                ),
            )),
        },
        None => match served.as_slice() {
            [] => Err(no_replica()),
            [only] => Ok(Arc::clone(only)),
            many => Err(Error::invalid(
                Reason::ModelAmbiguous,
                vec![Violation::new(
                    "model",
                    format!(
                        "must be given, since several are served: {}",
                        list(many.iter().map(|m| &***m))
                    ),
                )],
            )),
        },
    }
}

fn no_replica() -> Error {
    Error::new(
        Reason::NoReplica,
        "no replica is registered for this model now; ListReplicas shows who is there",
    )
}

/// At most eight names, for a message.
pub(super) fn list<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let count = names.len();
    let mut text = names
        .take(8)
        .map(|n| format!("{n:?}"))
        .collect::<Vec<_>>()
        .join(", ");
    if count > 8 {
        text.push_str(&format!(" and {} more", count - 8));
    }
    text
}

fn needs(call: &SampleCall, model: Arc<str>) -> Needs {
    let params = &call.params;
    let sampling = &params.sampling;
    let context = params.prompt.token_count().map_or(0, |prompt| {
        let output = sampling.max_tokens.unwrap_or(1);
        u32::try_from(prompt)
            .unwrap_or(u32::MAX)
            .saturating_add(output)
    });
    Needs {
        model,
        context,
        adapter: params.adapter.clone(),
        weights: params.weights.constraint.clone(),
        tokenizer: matches!(params.prompt, Prompt::Text(_))
            || sampling.stop.as_ref().is_some_and(|s| !s.is_empty()),
        min_tokens: sampling.min_tokens.is_some_and(|n| n > 0),
        odd_temperature: sampling
            .temperature
            .is_some_and(|t| (t > 0.0 && t < 0.01) || t > 2.0),
        output_logprobs: params.logprobs.output,
        prompt_logprobs: params.logprobs.prompt,
        top_logprobs: params.logprobs.top_k.max(params.logprobs.prompt_top_k),
        seed: sampling.seed.is_some(),
        routed_experts: params.routed_experts,
        structured_output: sampling.structured.is_some(),
        priority: call.priority != 0,
        stop_ids_past_eos: sampling.ignore_eos
            && sampling
                .stop_token_ids
                .as_ref()
                .is_some_and(|ids| !ids.is_empty()),
    }
}

/// One id outside the vocabulary ends an engine, and its retry the next one.
fn vocabulary(ranks: &[&RankView], params: &SampleParams, violations: &mut Vec<Violation>) {
    let Some(size) = ranks
        .iter()
        .filter_map(|r| r.replica.facts.vocab_size)
        .min()
        .map(std::num::NonZeroU32::get)
    else {
        return;
    };
    let mut check = |field: &'static str, ids: &mut dyn Iterator<Item = u32>| {
        let first = ids.enumerate().find(|(_, id)| *id >= size);
        if let Some((position, _)) = first {
            violations.push(Violation::new(
                field,
                format!("the id at position {position} is not below the vocabulary size of {size}"),
            ));
        }
    };
    if let Prompt::Tokens(ids) = &params.prompt {
        check("prompt", &mut ids.iter().copied());
    }
    if let Some(ids) = &params.sampling.stop_token_ids {
        check("sampling.stop_token_ids", &mut ids.iter().copied());
    }
    check(
        "sampling.logit_bias",
        &mut params.sampling.logit_bias.keys().copied(),
    );
}

fn length(
    ranks: &[&RankView],
    params: &SampleParams,
    needs: &Needs,
    violations: &mut Vec<Violation>,
) {
    let longest = ranks
        .iter()
        .map(|r| r.replica.facts.context_length)
        .max()
        .unwrap_or(0);
    if needs.context > longest {
        let prompt = params.prompt.token_count().unwrap_or(0);
        violations.push(Violation::new(
            "prompt",
            match params.sampling.max_tokens {
                Some(max_tokens) => format!(
                    "has {prompt} tokens and sampling.max_tokens is {max_tokens}: together more \
                     than the context of {longest} tokens"
                ),
                None => format!(
                    "has {prompt} tokens, which leaves no room in the context of {longest} tokens"
                ),
            },
        ));
    }
}

fn capabilities(ranks: &[&RankView], needs: &Needs) -> Result<(), Error> {
    if ranks.iter().any(|r| needs.permanent_lack(r).is_none()) {
        return Ok(());
    }
    let may_yet = |rank: &&RankView| {
        let mut lacks = needs.permanent_lacks(rank);
        lacks.all(|lack| matches!(lack, Lack::Untold(_)))
    };
    if let Some(rank) = ranks.iter().copied().find(may_yet) {
        return Err(Error::new(
            Reason::NoReplica,
            format!(
                "replica {} has just been registered, and its engine has not told yet all that \
                 it can do: try again in a few seconds",
                rank.replica.facts.id
            ),
        ));
    }
    let mut lacks: Vec<Lack> = ranks.iter().flat_map(|r| needs.lacks(r)).collect();
    lacks.sort();
    lacks.dedup();
    if lacks == [Lack::Adapter] {
        return Err(no_adapter());
    }
    let mut told: Vec<String> = lacks
        .iter()
        .take(MOST_LACKS)
        .map(ToString::to_string)
        .collect();
    if lacks.len() > MOST_LACKS {
        told.push(format!("and {} more", lacks.len() - MOST_LACKS));
    }
    Err(Error::new(
        Reason::NotSupported,
        format!(
            "no replica of this model can honour the request; what one or another lacks: {}",
            told.join("; ")
        ),
    ))
}

/// Lacks in a message; each weight version is one.
const MOST_LACKS: usize = 16;

/// Nobody can serve the adapter. The names of those that there are stay with
/// operators: an adapter may be another caller's. Nor are they counted: whoever asks for
/// one that is not there would have all of them looked through.
fn no_adapter() -> Error {
    Error::new(
        Reason::NotSupported,
        "no replica of this model serves the adapter asked for (ListReplicas names those that \
         are served)",
    )
}

fn weights(ranks: &[&RankView], needs: &Needs) -> Result<(), Error> {
    if ranks.iter().any(|r| needs.lack(r).is_none()) {
        return Ok(());
    }
    let mut versions: Vec<&str> = ranks.iter().map(|r| &*r.weight_version).collect();
    versions.sort_unstable();
    versions.dedup();
    Err(Error::new(
        Reason::WeightsNotServed,
        format!(
            "no rank serves the weights asked for; served: {}",
            list(versions.iter().copied())
        ),
    ))
}

#[cfg(test)]
mod tests;
