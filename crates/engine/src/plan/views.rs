//! Operations on lists of views.

use sandbox::spec::{Exec, ReadOnlyView, ViewContent};

/// Sorts parents before children, so that no mount hides one that was made before it. Merges views with the same
/// target.
pub(super) fn sort_for_mounting(views: &mut Vec<ReadOnlyView>) {
    views.sort_by_key(|v| (v.target.as_path().components().count(), v.target.clone()));
    views.dedup_by(|later, kept| {
        let same = later.target == kept.target;
        if same && later.source == kept.source {
            merge(kept, later);
        }
        same
    });
}

/// Combines two views of the same source: allows what either allows, and keeps the stricter content check.
pub(super) fn merge(known: &mut ReadOnlyView, other: &ReadOnlyView) {
    if other.exec == Exec::Allowed {
        known.exec = Exec::Allowed;
    }
    if other.content == ViewContent::Data {
        known.content = ViewContent::Data;
    }
}
