//! `SampleStream`: a follower's events as messages. A reader that is slow is
//! simply not polled; what it has not read stays in the generation's one buffer.

use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, stream};
use tonic::Status;

use super::{told::Untold, write};
use crate::{
    proto::{self, sample_stream_response::Event as Wire},
    stack::follow::{Event, Follower},
};

/// What a stream answers with.
pub(super) type EventStream =
    Pin<Box<dyn Stream<Item = Result<proto::SampleStreamResponse, Status>> + Send>>;

/// How the final message is written.
pub(super) struct Form {
    pub(super) packed: bool,
    pub(super) keyed: bool,
    pub(super) request_id: Arc<str>,
}

pub(super) fn events(follower: Follower, form: Form, untold: Untold) -> EventStream {
    Box::pin(stream::unfold(
        (follower, form, untold),
        |(mut follower, form, mut untold)| async move {
            let event = follower.next().await?;
            match &event {
                Ok(Event::Final(finished)) => untold.answered(finished),
                Err(error) => untold.refused(error),
                Ok(_) => {}
            }
            let message = event
                .map(|event| message(event, &form))
                .map_err(Status::from);
            Some((message, (follower, form, untold)))
        },
    ))
}

fn message(event: Event, form: &Form) -> proto::SampleStreamResponse {
    let event = match event {
        Event::Started(routes) => Wire::Started(proto::Started {
            request_id: form.request_id.to_string(),
            routes: routes.iter().map(write::route).collect(),
        }),
        Event::Delta {
            sample,
            attempt,
            offset,
            tokens,
            logprobs,
        } => Wire::Delta(proto::Delta {
            sample,
            attempt,
            offset,
            token_ids: tokens,
            logprobs,
        }),
        Event::Reset {
            sample,
            attempt,
            keep,
        } => Wire::Reset(proto::Reset {
            sample,
            attempt,
            keep,
        }),
        Event::Alive => Wire::Alive(proto::Alive {}),
        Event::Final(finished) => Wire::Final(write::response(
            &finished,
            form.packed,
            form.keyed,
            &form.request_id,
        )),
    };
    proto::SampleStreamResponse { event: Some(event) }
}
