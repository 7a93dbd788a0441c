//! Lists in messages that stock clients decode: gRPC's of all languages refuse more
//! than 4 MiB unless they are told otherwise.

use prost::Message;

use super::message::replica;
use crate::{
    api::register::is_id,
    error::{Error, Reason, Violation},
    fleet::Fleet,
    ids::ReplicaId,
    proto,
};

/// Replicas of one message are this many bytes at most, or one replica: with all that
/// a registration may hold, that is less than 3 MiB.
pub(super) const PAGE_BYTES: usize = 2 << 20;

/// Replicas of one page at most.
const MAX_PAGE: usize = 1000;

/// Replicas that are taken out of the fleet at once: its lock is held for so long.
const LOOKED_AT_ONCE: usize = 64;

/// One page of `ListReplicas`.
///
/// # Errors
/// INVALID_REQUEST for what is no page token.
pub(super) fn list(
    fleet: &Fleet,
    request: proto::ListReplicasRequest,
) -> Result<proto::ListReplicasResponse, Error> {
    let token = request.page_token;
    if !(token.is_empty() || is_id(&token)) {
        return Err(Error::invalid(
            Reason::InvalidRequest,
            vec![Violation::new(
                "page_token",
                "must be empty, or the next_page_token of the page before",
            )],
        ));
    }
    let most = match request.page_size {
        0 => MAX_PAGE,
        wanted => usize::try_from(wanted).unwrap_or(MAX_PAGE).min(MAX_PAGE),
    };
    let wanted = |model: &str| {
        request
            .model
            .as_deref()
            .is_none_or(|wanted| model == wanted)
    };
    let mut page = proto::ListReplicasResponse::default();
    let mut bytes = 0;
    let mut after = Some(token)
        .filter(|token| !token.is_empty())
        .map(ReplicaId::new);
    loop {
        let some = fleet.list_after(after.as_ref(), LOOKED_AT_ONCE);
        let Some(last) = some.last() else {
            return Ok(page);
        };
        after = Some(last.facts.id.clone());
        for status in some.into_iter().filter(|s| wanted(&s.facts.model)) {
            let message = replica(status);
            bytes += message.encoded_len();
            if let Some(before) = page.replicas.last()
                && (page.replicas.len() >= most || bytes > PAGE_BYTES)
            {
                page.next_page_token.clone_from(&before.replica_id);
                return Ok(page);
            }
            page.replicas.push(message);
        }
    }
}
